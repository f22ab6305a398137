"""Where a bucket's gradients lie: always, or only while they are collected and reduced.

[Note: Gradient memory]
``"full"``: every bucket keeps a flat buffer for the gradients of all ranks; the owner's part is its own shard of it.
``"sharded"`` (ZeRO-2): gradients stay where autograd put them until their bucket is complete. Then it borrows a flat
buffer from a pool, and gives it back when its reduction has been waited for; what stays is the owner's part, a tensor
of its own. So the peak is the gradients that wait, in the params' dtype, plus at most ``IN_FLIGHT`` flat buffers.
Inside ``no_sync()`` gradients are summed in the reduction dtype, and every bucket that has one keeps a flat buffer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from freehold.plan import Layout, Slot
from freehold.runtime.pool import TensorPool

__all__ = ["IN_FLIGHT", "GradMemory", "GradientBuffer", "GradientForecast", "forecast"]

GradMemory = Literal["full", "sharded"]

IN_FLIGHT = 2
"""Reductions that may be under way at once with ``"sharded"``: one is sent while the next one fills its buffers."""

_BACKWARDS_UNTIL_SETTLED = 4
"""After so many it is clear which tensor of the pool serves which buckets."""


class GradientBuffer:
    """The gradients of one bucket.

    Args:
        numel: Elements of the bucket.
        own_start: Where the own shard begins.
        owned: The own slots, by offset.
        like: A tensor of the device; its dtype does not matter.
        dtype: The reduction dtype.
        pool: Where flat buffers come from with ``"sharded"``, ``None`` with ``"full"``.

    Attributes:
        flat: ``(numel,)``, or ``None`` while the bucket is closed.
        own: ``(extent,)`` the own shard up to the end of its last slot; a view of ``flat`` with ``"full"``.
        dtype: The reduction dtype.
        pool: The pool, or ``None``.
    """

    def __init__(
        self,
        *,
        numel: int,
        own_start: int,
        owned: Sequence[Slot],
        like: Tensor,
        dtype: torch.dtype,
        pool: TensorPool | None,
    ) -> None:
        self.dtype = dtype
        self.numel = numel
        self.pool = pool
        extent = owned[-1].offset + owned[-1].numel if owned else 0
        self._own_place = slice(own_start, own_start + extent)
        edges = [0, *(slot.offset + slot.numel for slot in owned)]
        self._gaps = [slice(edge, slot.offset) for edge, slot in zip(edges, owned, strict=False) if slot.offset > edge]
        self._whole: Tensor | None = None
        self.flat: Tensor | None = None
        if pool is None:
            self.flat = torch.zeros(numel, dtype=dtype, device=like.device)
            self.own = self.flat[self._own_place]
        else:
            self.own = torch.zeros(extent, dtype=dtype, device=like.device)

    @property
    def nbytes(self) -> int:
        """Bytes held just now, borrowed ones included."""
        if self.pool is None:
            return self.numel * self.dtype.itemsize
        borrowed = 0 if self._whole is None else self._whole.nbytes
        return self.own.nbytes + borrowed

    def open(self) -> bool:
        """Have a flat buffer, with anything in it; tells whether it is a new one, so that views must be made again."""
        if self.flat is not None:
            return False
        assert self.pool is not None, "a full gradient buffer is always open"
        self._whole = self.pool.take(self.numel, self.own)
        self.flat = self._whole[: self.numel]
        return True

    def keep_own(self) -> bool:
        """The reduction has ended: keep the owner's part alone. Tells whether ``flat`` is gone."""
        if self.pool is None or self.flat is None:
            return False
        self.own.copy_(self.flat[self._own_place])
        for gap in self._gaps:  # alignment padding of a borrowed buffer holds anything; rules need zeros there
            self.own[gap].zero_()
        return self.give_back()

    def give_back(self) -> bool:
        """Return the flat buffer without keeping anything. Tells whether ``flat`` is gone."""
        if self.pool is None or self._whole is None:
            return False
        self.pool.give_back(self._whole)
        self._whole = self.flat = None
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientForecast:
    """What the gradients of one backward will take with ``"sharded"``, beside the owned parts.

    Attributes:
        pool_bytes: What the pool holds, once it has settled.
        peak_bytes: The most that flat buffers and waiting gradients take at once.
    """

    pool_bytes: int
    peak_bytes: int


def forecast(
    layout: Layout, itemsizes: Mapping[str, int], *, grad_itemsize: int = 4, in_flight: int = IN_FLIGHT
) -> GradientForecast:
    """Run the pool, on tensors without memory, through backwards whose gradients arrive in backward order.

    Args:
        layout: The plan.
        itemsizes: Bytes of an element of each dtype in the layout.
        grad_itemsize: Bytes of an element of the reduction dtype; float64 params take 8.
        in_flight: Reductions under way at once.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> layout = plan([ParamSpec(name=f"w{i}", shape=(64, 64)) for i in range(8)], num_ranks=2, bucket_numel=8192)
        >>> found = forecast(layout, {"bfloat16": 2})
        >>> len(layout.buckets), 4 * layout.numel, found.pool_bytes, found.peak_bytes
        (4, 131072, 65536, 81920)
    """
    pool = TensorPool()
    peaks = [_run_through(pool, layout, itemsizes, grad_itemsize, in_flight) for _ in range(_BACKWARDS_UNTIL_SETTLED)]
    return GradientForecast(pool_bytes=pool.held_bytes(), peak_bytes=peaks[-1])


def _run_through(
    pool: TensorPool, layout: Layout, itemsizes: Mapping[str, int], grad_itemsize: int, in_flight: int
) -> int:
    specs = [spec for spec in reversed(layout.params) if spec.tied_to is None]
    missing = Counter(layout.bucket_of(spec.name).index for spec in specs)
    launched: deque[Tensor] = deque()
    next_launch = waiting_bytes = peak_bytes = 0
    for spec in specs:
        missing[layout.bucket_of(spec.name).index] -= 1
        waiting_bytes += spec.numel * itemsizes[spec.dtype]
        while next_launch < len(layout.buckets) and missing[next_launch] == 0:
            bucket = layout.buckets[next_launch]
            itemsize = 8 if bucket.dtype == "float64" else grad_itemsize
            if len(launched) >= in_flight:
                pool.give_back(launched.popleft())
            launched.append(pool.take(itemsize * bucket.numel, torch.empty(0, dtype=torch.uint8, device="meta")))
            pooled_bytes = pool.held_bytes() + sum(tensor.nbytes for tensor in launched)
            peak_bytes = max(peak_bytes, pooled_bytes + waiting_bytes)
            waiting_bytes -= bucket.real_numel * itemsizes[bucket.dtype]
            next_launch += 1
    for tensor in launched:
        pool.give_back(tensor)
    return peak_bytes
