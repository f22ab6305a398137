"""The seam to torch.distributed: every collective of the runtime goes through one small interface.

[Note: Transports]
A transport moves the shards of a flat buffer, in place. Shard ``r`` is ``flat[r * n : (r + 1) * n]`` and belongs to
group rank ``r``. ``reduce_scatter`` leaves the SUM over ranks in the caller's own shard; ``all_gather`` fills the
others' shards. Both start at once and return a ``Pending``, which keeps every tensor and handle referenced until
``wait()``: the allocator may otherwise hand memory out again while a collective still reads it.

Which collective is used depends on the backend and is decided in ``make_comm`` alone. On gloo, exchanging shards by
isend/irecv is three to four times faster than the built-in reduce-scatter and all-gather (``docs/benchmarks.md``);
on nccl and others the native single-tensor collectives run in place. No process group is ever created here, since
``new_group`` would need every rank of WORLD.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freehold.errors import LifecycleError

__all__ = [
    "Comm",
    "GlooComm",
    "LocalComm",
    "NativeComm",
    "Pending",
    "ReceivePool",
    "control_comm",
    "make_comm",
]

# Point-to-point tags: "FH" in the upper half, so that a user's own small tags cannot meet ours; below it one stripe of
# _TAGS_PER_OWNER for each optimizer on the group, two tags (one a direction) a bucket.
_TAG_BASE = 0x4648_0000
_TAGS_PER_OWNER = 1 << 10
_NUM_STRIPES = 64
_REDUCE, _GATHER = 0, 1

# torch 2.13 renamed these two and warns at the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective under way. ``wait()`` finishes it, once; all that it reads or writes stays referenced until then."""

    __slots__ = ("_finish", "_kept", "_works")

    def __init__(
        self,
        works: list[Any],
        kept: tuple[Tensor, ...],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._works = works
        self._kept = kept
        self._finish = finish

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until the result may be read."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._kept, self._finish = [], (), None


class ReceivePool:
    """Scratch tensors for incoming shards, reused from bucket to bucket.

    It holds as many tensors as were in flight at once, each as large as the largest request it served.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A 1-D tensor of at least ``numel`` elements with the dtype and device of ``like``."""
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

    def held_bytes(self) -> int:
        """Bytes of the tensors that lie idle in the pool."""
        return sum(t.numel() * t.element_size() for t in self._free)

    def _remove(self, tensor: Tensor) -> None:
        self._free = [t for t in self._free if t is not tensor]


class Comm(ABC):
    """The group of ranks that share one layout. ``rank`` is the group rank, never the global one.

    Call order: the control collectives (``exchange``, ``max_``, ``gather_objects``, ``broadcast_``) block and are
    entered by all ranks alike; ``reduce_scatter`` and ``all_gather`` return at once and are started in bucket order
    on every rank.
    """

    rank: int
    num_ranks: int
    max_in_flight: int | None = None
    """How many reductions may be under way before the oldest must be finished (bounds the receive space)."""

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, bucket: int) -> Pending:
        """Start summing ``flat`` ``(num_ranks * n,)`` over ranks; the own shard holds the SUM after ``wait()``."""

    @abstractmethod
    def all_gather(self, flat: Tensor, bucket: int) -> Pending:
        """Start filling the other ranks' shards of ``flat`` ``(num_ranks * n,)`` with what those ranks hold there."""

    @abstractmethod
    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite ``tensor``, of any dtype, with that of group rank 0."""

    @abstractmethod
    def exchange(self, row: Tensor) -> Tensor:
        """All ranks' ``row`` ``(k,)`` int64 or float64 on the CPU, as ``(num_ranks, k)`` on the CPU."""

    @abstractmethod
    def max_(self, flags: Tensor) -> Tensor:
        """Elementwise maximum over ranks of a uint8 CPU tensor, in place."""

    @abstractmethod
    def gather_objects(self, value: object) -> list[Any]:
        """Every rank's picklable ``value``, by rank."""

    def own_shard(self, flat: Tensor) -> Tensor:
        """The view of ``flat`` that belongs to this rank."""
        n = flat.numel() // self.num_ranks
        return flat[self.rank * n : (self.rank + 1) * n]


class LocalComm(Comm):
    """A group of one: every collective is already done."""

    rank = 0
    num_ranks = 1

    def reduce_scatter(self, flat: Tensor, bucket: int) -> Pending:
        return Pending([], (flat,))

    def all_gather(self, flat: Tensor, bucket: int) -> Pending:
        return Pending([], (flat,))

    def broadcast_(self, tensor: Tensor) -> None:
        pass

    def exchange(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def max_(self, flags: Tensor) -> Tensor:
        return flags

    def gather_objects(self, value: object) -> list[Any]:
        return [value]


class _GroupComm(Comm):
    """What all torch.distributed backends have in common: the control collectives."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._control_device = device

    def broadcast_(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        dense = tensor.detach().contiguous()
        # As bytes: gloo knows neither bool nor every floating dtype, and nothing is computed here.
        dist.broadcast(dense.reshape(-1).view(torch.uint8), group=self.group, group_src=0)
        if not tensor.is_contiguous():
            tensor.copy_(dense)

    def exchange(self, row: Tensor) -> Tensor:
        sent = row.to(self._control_device)
        rows = [torch.empty_like(sent) for _ in range(self.num_ranks)]
        dist.all_gather(rows, sent, group=self.group)
        return torch.stack(rows).cpu()

    def max_(self, flags: Tensor) -> Tensor:
        sent = flags.to(self._control_device)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self.group)
        return flags.copy_(sent)

    def gather_objects(self, value: object) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values


class NativeComm(_GroupComm):
    """In-place native collectives; what nccl is best at. Untested on GPUs so far: see docs/gpu.md."""

    def reduce_scatter(self, flat: Tensor, bucket: int) -> Pending:
        own = self.own_shard(flat)
        work = _reduce_scatter_single(own, flat, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        return Pending([work], (flat, own))

    def all_gather(self, flat: Tensor, bucket: int) -> Pending:
        own = self.own_shard(flat)
        work = _all_gather_single(flat, own, group=self.group, async_op=True)
        return Pending([work], (flat, own))


class GlooComm(_GroupComm):
    """Shards exchanged point to point, the sum done here in rank order.

    Summing in rank order makes a reduced gradient independent of the layout: who owns a matrix changes no bit of it.
    """

    max_in_flight = 4

    def __init__(self, group: dist.ProcessGroup, device: torch.device, stripe: int) -> None:
        super().__init__(group, device)
        self._pool = ReceivePool()
        self._tag = _TAG_BASE + (stripe % _NUM_STRIPES) * _TAGS_PER_OWNER
        self._peers = [r for r in range(self.num_ranks) if r != self.rank]

    def _tag_of(self, bucket: int, direction: int) -> int:
        # Buckets that share a tag after wrapping round are started in the same order everywhere, and gloo delivers
        # messages of one tag in the order in which they were sent.
        return self._tag + (2 * bucket + direction) % _TAGS_PER_OWNER

    def reduce_scatter(self, flat: Tensor, bucket: int) -> Pending:
        n = flat.numel() // self.num_ranks
        tag = self._tag_of(bucket, _REDUCE)
        received = self._pool.take(n * len(self._peers), flat)
        parts = {peer: received[i * n : (i + 1) * n] for i, peer in enumerate(self._peers)}
        works = [dist.irecv(parts[r], group=self.group, group_src=r, tag=tag) for r in self._peers]
        works += [self._isend(flat, r, n, tag) for r in self._peers]
        parts[self.rank] = self.own_shard(flat)

        def finish() -> None:
            _sum_in_rank_order([parts[r] for r in range(self.num_ranks)], out=parts[self.rank])
            self._pool.give_back(received)

        return Pending(works, (flat, received), finish)

    def all_gather(self, flat: Tensor, bucket: int) -> Pending:
        n = flat.numel() // self.num_ranks
        tag = self._tag_of(bucket, _GATHER)
        works = [dist.irecv(flat[r * n : (r + 1) * n], group=self.group, group_src=r, tag=tag) for r in self._peers]
        own = self.own_shard(flat)
        works += [dist.isend(own, group=self.group, group_dst=r, tag=tag) for r in self._peers]
        return Pending(works, (flat, own))

    def _isend(self, flat: Tensor, peer: int, n: int, tag: int) -> Any:
        return dist.isend(flat[peer * n : (peer + 1) * n], group=self.group, group_dst=peer, tag=tag)


def _sum_in_rank_order(parts: list[Tensor], out: Tensor) -> None:
    """``((p0 + p1) + p2) + ...`` into ``out``, which is one of ``parts``; the other parts may be overwritten."""
    first, *rest = parts
    if first is out or not rest:
        for part in rest:
            out.add_(part)
        return
    total = first
    for part in rest[:-1]:
        total.add_(part)
    torch.add(total, rest[-1], out=out)


def make_comm(group: dist.ProcessGroup | None, device: torch.device, stripe: int = 0) -> Comm:
    """The transport for a group and the device that the params lie on.

    Args:
        group: The data-parallel group, or ``None`` for a group of one without torch.distributed.
        device: Device of the params.
        stripe: Number of this optimizer among those on the group, the same on every rank; keeps their messages apart.

    Raises:
        LifecycleError: The group has no backend for this kind of device.
    """
    if group is None:
        return LocalComm()
    if dist.get_world_size(group) == 1:
        return LocalComm()
    backend = _backend_name(group, device)
    if backend == "gloo":
        return GlooComm(group, device, stripe)
    return NativeComm(group, device)


def control_comm(group: dist.ProcessGroup | None) -> Comm:
    """The group before anything is known of the params: for control collectives only."""
    if group is None or dist.get_world_size(group) == 1:
        return LocalComm()
    return NativeComm(group, torch.device("cpu"))


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError as error:
        raise LifecycleError(
            f"the process group has no backend for params on {device} ({error}); "
            "create it with one, for example init_process_group('cpu:gloo,cuda:nccl')"
        ) from error
