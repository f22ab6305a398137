"""Scratch tensors that are handed from bucket to bucket."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TensorPool"]


class TensorPool:
    """Scratch tensors, reused from bucket to bucket.

    It holds as many tensors as were in use at once, each as large as the largest request it served.

    Example:
        >>> pool = TensorPool()
        >>> pool.give_back(pool.take(100, torch.zeros(1)))
        >>> pool.take(60, torch.zeros(1)).numel(), pool.held_bytes()
        (100, 0)
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A 1-D tensor of at least ``numel`` elements, with the dtype and device of ``like`` and anything in it."""
        alike = [t for t in self._free if t.dtype == like.dtype and t.device == like.device]
        alike.sort(key=Tensor.numel)
        for tensor in alike:  # the smallest that is large enough
            if tensor.numel() >= numel:
                self._remove(tensor)
                return tensor
        if alike:  # all too small: let the largest go rather than keep both
            self._remove(alike[-1])
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def give_back(self, tensor: Tensor) -> None:
        """Return what ``take`` handed out."""
        self._free.append(tensor)

    def trim(self, num_tensors: int) -> None:
        """Keep at most so many of the idle tensors, the largest."""
        self._free = sorted(self._free, key=Tensor.numel)[-num_tensors:]

    def held_bytes(self) -> int:
        """Bytes of the tensors that lie idle in the pool."""
        return sum(t.nbytes for t in self._free)

    def _remove(self, tensor: Tensor) -> None:
        self._free = [t for t in self._free if t is not tensor]
