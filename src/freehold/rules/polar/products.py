"""Matrix products into reused memory, and those of symmetric results by halves."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MIN_HALVES_DIM", "Workspace", "affine_product", "symmetric_product"]

# Results of at least this size are computed by halves where that is asked for. Panels of 128 rows won 1.2 to 1.6 times
# from 512 on, and nothing at 256, on a CPU with bf16 units (docs/newton_schulz.md); at most 8 panels, for launches.
MIN_HALVES_DIM = 384
_MIN_PANEL = 128
_MAX_NUM_PANELS = 8

# On CPU torch transposes in blocks if both ends are contiguous, else element by element. From rows of this many numbers
# on that is worth two more copies: in bfloat16 a mirror image took 0.32 of the time with 1024 columns, 0.21 with 2048.
_MIN_BLOCKED_STRIDE = 1024


class Workspace:
    """Scratch tensors by name, kept while their shape stays the same, so that equal batches share memory.

    Example:
        >>> import torch
        >>> work = Workspace()
        >>> like = torch.zeros(1, dtype=torch.bfloat16)
        >>> work.take("gram", (4, 4), like).data_ptr() == work.take("gram", (4, 4), like).data_ptr()
        True
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of this shape, with the dtype and device of ``like``; its contents are arbitrary."""
        found = self._tensors.get(name)
        if found is None or (found.shape, found.dtype, found.device) != (shape, like.dtype, like.device):
            self._tensors.pop(name, None)  # first, so that both are never held together
            found = self._tensors[name] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return found


def affine_product(base: Tensor | None, left: Tensor, right: Tensor, beta: float, alpha: float, out: Tensor) -> Tensor:
    """``out = beta base + alpha left @ right``, for matrices or batches of them; ``out`` is none of the operands."""
    if base is None:
        return torch.matmul(left, right, out=out)
    fused = torch.addmm if out.ndim == 2 else torch.baddbmm
    return fused(base, left, right, beta=beta, alpha=alpha, out=out)


def symmetric_product(
    base: Tensor | None, left: Tensor, right: Tensor, beta: float, alpha: float, out: Tensor, *, halves: bool
) -> Tensor:
    """The same where the result ``(.., m, m)`` is symmetric; with ``halves``, only its lower panels are multiplied.

    A panel is some columns from the diagonal down; its mirror image completes the rows beside it. With p panels
    (p + 1) / 2p of the work is left, 9/16 with 8.
    """
    size = out.size(-1)
    if not halves or size < MIN_HALVES_DIM:
        return affine_product(base, left, right, beta, alpha, out)
    panel = max(_MIN_PANEL, -(-size // _MAX_NUM_PANELS))
    for start in range(0, size, panel):
        stop = min(start + panel, size)
        lower = out[..., start:, start:stop]
        part = None if base is None else base[..., start:, start:stop]
        affine_product(part, left[..., start:, :], right[..., start:stop], beta, alpha, lower)
        if stop < size:
            _mirror(out[..., stop:, start:stop], out[..., start:stop, stop:])
    return out


def _mirror(below: Tensor, beside: Tensor) -> None:
    """``beside <- below^T``, for ``(.., k, p)`` and ``(.., p, k)``, neither contiguous."""
    in_blocks = below.is_cpu and below.ndim == 2 and below.stride(0) >= _MIN_BLOCKED_STRIDE
    beside.copy_(below.contiguous().mT.contiguous() if in_blocks else below.mT)
