"""The seam to torch.distributed: every collective of the runtime goes through one small interface.

[Note: Transports]
A transport moves the shards of a flat buffer, in place. Shard ``r`` is ``flat[r * n : (r + 1) * n]`` and belongs to
group rank ``r``. ``reduce_scatter`` leaves the SUM over ranks in the caller's own shard; ``all_gather`` fills the
others' shards. Both start at once and return a ``Pending``, which keeps every tensor and handle referenced until
``wait()``: the allocator may otherwise hand memory out again while a collective still reads it.

Which collective is used depends on the backend and is decided in ``make_comm`` alone. On gloo, exchanging shards by
isend/irecv is three to four times faster than the built-in reduce-scatter and all-gather (``docs/benchmarks.md``);
the control collectives go the same way, since such a wait can be given a limit and knows which rank it is for. On
nccl and others the native single-tensor collectives run in place. No process group is ever created here, since
``new_group`` would need every rank of WORLD. How long a wait may last is up to the ``PeerWatch``: see [Note: Faults].
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freehold.errors import LifecycleError
from freehold.runtime.messages import Kind, Messages, receive, send
from freehold.runtime.peers import PeerWatch, Transfer
from freehold.runtime.pool import TensorPool

__all__ = [
    "Comm",
    "GlooComm",
    "LocalComm",
    "NativeComm",
    "Pending",
    "control_comm",
    "make_comm",
]

# Point-to-point tags: "FH" in the upper half, so that a user's own small tags cannot meet ours; below it one stripe of
# _TAGS_PER_OWNER for each optimizer on the group, two tags (one a direction) a bucket, the last few for control. What
# is exchanged before there is an optimizer has a stripe of its own before all others.
_TAG_BASE = 0x4648_0000
_TAGS_PER_OWNER = 1 << 10
_BUCKET_TAGS = _TAGS_PER_OWNER - 4
_NUM_STRIPES = 64
_REDUCE, _GATHER = 0, 1

# torch 2.13 renamed these two and warns at the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective under way. ``wait()`` finishes it, once; all that it reads or writes stays referenced until then."""

    __slots__ = ("_finish", "_kept", "_transfers", "_watch", "_what")

    def __init__(
        self,
        transfers: list[Transfer],
        kept: tuple[Tensor, ...],
        finish: Callable[[], None] | None = None,
        *,
        watch: PeerWatch | None = None,
        what: str = "",
    ) -> None:
        assert watch is not None or not transfers, "what is waited for needs a limit"
        self._transfers = transfers
        self._kept = kept
        self._finish = finish
        self._watch = watch
        self._what = what

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until the result may be read.

        Raises:
            PeerError: Another rank died, or did not answer in time.
            LifecycleError: One had before.
        """
        if self._watch is not None:
            self._watch.wait(self._transfers, self._what)
        if self._finish is not None:
            self._finish()
        self._transfers, self._kept, self._finish, self._watch = [], (), None, None


class Comm(ABC):
    """The group of ranks that share one layout. ``rank`` is the group rank, never the global one.

    Call order: the control collectives (``exchange``, ``max_``, ``gather_objects``, ``broadcast_``) block and are
    entered by all ranks alike; ``reduce_scatter`` and ``all_gather`` return at once and are started in bucket order
    on every rank.
    """

    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None = None
    """The process group, if there is more than one rank."""
    max_in_flight: int | None = None
    """How many reductions may be under way before the oldest must be finished (bounds the receive space)."""
    watch: PeerWatch
    """How long this rank waits for the others, and what has become of them."""

    def detach(self) -> None:
        """No more calls: let go of the process group, so that ``destroy_process_group`` ends its threads at once.

        A group that outlives that call ends with the interpreter, which its threads do not survive.
        """
        self.watch.detach()

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

    def __init__(self) -> None:
        self.watch = PeerWatch(None, 0)

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

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, bounded: bool) -> None:
        self.group: dist.ProcessGroup | None = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._control_device = device
        self.watch = PeerWatch(group, self.rank, bounded=bounded)

    def detach(self) -> None:
        self.group = None
        self.watch.detach()

    def broadcast_(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        dense = tensor.detach().contiguous()
        # As bytes: gloo knows neither bool nor every floating dtype, and nothing is computed here.
        self._broadcast(dense.reshape(-1).view(torch.uint8))
        if not tensor.is_contiguous():
            tensor.copy_(dense)

    @abstractmethod
    def _broadcast(self, flat: Tensor) -> None:
        """``broadcast_`` of contiguous bytes."""


class NativeComm(_GroupComm):
    """In-place native collectives; what nccl is best at. Untested on GPUs so far: see docs/gpu.md."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device, bounded=device.type == "cpu")

    def reduce_scatter(self, flat: Tensor, bucket: int) -> Pending:
        own, what = self.own_shard(flat), self.watch.of_bucket("the reduction", bucket)
        with self.watch.starting(what):
            work = _reduce_scatter_single(own, flat, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        return Pending([Transfer(work=work)], (flat, own), watch=self.watch, what=what)

    def all_gather(self, flat: Tensor, bucket: int) -> Pending:
        own, what = self.own_shard(flat), self.watch.of_bucket("the gather", bucket)
        with self.watch.starting(what):
            work = _all_gather_single(flat, own, group=self.group, async_op=True)
        return Pending([Transfer(work=work)], (flat, own), watch=self.watch, what=what)

    def exchange(self, row: Tensor) -> Tensor:
        sent = row.to(self._control_device)
        rows = [torch.empty_like(sent) for _ in range(self.num_ranks)]
        self._wait(Kind.NUMBERS, lambda: dist.all_gather(rows, sent, group=self.group, async_op=True))
        return torch.stack(rows).cpu()

    def max_(self, flags: Tensor) -> Tensor:
        sent = flags.to(self._control_device)
        self._wait(Kind.FLAGS, lambda: dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.group, async_op=True))
        return flags.copy_(sent)

    def gather_objects(self, value: object) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        with self.watch.starting(Kind.OBJECTS):  # torch has no form of it that returns at once
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _broadcast(self, flat: Tensor) -> None:
        self._wait("a broadcast", lambda: dist.broadcast(flat, group=self.group, group_src=0, async_op=True))

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        with self.watch.starting(what):
            work = start()
        self.watch.wait([Transfer(work=work)], what)


class GlooComm(_GroupComm):
    """Shards exchanged point to point, the sum done here in rank order.

    Summing in rank order makes a reduced gradient independent of the layout: who owns a matrix changes no bit of it.

    Args:
        group: The process group.
        device: Of the params.
        stripe: Number of the optimizer among those on the group; -1 before there is one.
    """

    max_in_flight = 2

    def __init__(self, group: dist.ProcessGroup, device: torch.device, stripe: int) -> None:
        super().__init__(group, device, bounded=True)
        self._pool = TensorPool()
        self._tag = _TAG_BASE + (stripe % _NUM_STRIPES if stripe >= 0 else -1) * _TAGS_PER_OWNER
        self._peers = [r for r in range(self.num_ranks) if r != self.rank]
        self._messages = Messages(group, self.rank, self.num_ranks, self.watch, self._tag + _BUCKET_TAGS)

    def detach(self) -> None:
        super().detach()
        self._messages.detach()

    def _tag_of(self, bucket: int, direction: int) -> int:
        # Buckets that share a tag after wrapping round are started in the same order everywhere, and gloo delivers
        # messages of one tag in the order in which they were sent.
        return (2 * bucket + direction) % _BUCKET_TAGS

    def reduce_scatter(self, flat: Tensor, bucket: int) -> Pending:
        n = flat.numel() // self.num_ranks
        tag, what = self._tag_of(bucket, _REDUCE), self.watch.of_bucket("the reduction", bucket)
        received = self._pool.take(n * len(self._peers), flat)
        parts = {peer: received[i * n : (i + 1) * n] for i, peer in enumerate(self._peers)}
        with self.watch.starting(what):
            transfers = [self._receive(parts[r], r, tag) for r in self._peers]
            transfers += [self._send(flat[r * n : (r + 1) * n], r, tag) for r in self._peers]
        parts[self.rank] = self.own_shard(flat)

        def finish() -> None:
            _sum_in_rank_order([parts[r] for r in range(self.num_ranks)], out=parts[self.rank])
            self._pool.give_back(received)

        return Pending(transfers, (flat, received), finish, watch=self.watch, what=what)

    def all_gather(self, flat: Tensor, bucket: int) -> Pending:
        n = flat.numel() // self.num_ranks
        tag, what = self._tag_of(bucket, _GATHER), self.watch.of_bucket("the gather", bucket)
        own = self.own_shard(flat)
        with self.watch.starting(what):
            transfers = [self._receive(flat[r * n : (r + 1) * n], r, tag) for r in self._peers]
            transfers += [self._send(own, r, tag) for r in self._peers]
        return Pending(transfers, (flat, own), watch=self.watch, what=what)

    def exchange(self, row: Tensor) -> Tensor:
        parts = self._messages.swap(Kind.NUMBERS, row.contiguous().view(torch.uint8))
        return torch.stack([part.view(row.dtype) for part in parts])

    def max_(self, flags: Tensor) -> Tensor:
        for part in self._messages.swap(Kind.FLAGS, flags):
            torch.maximum(flags, part, out=flags)
        return flags

    def gather_objects(self, value: object) -> list[Any]:
        sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        # From the ranks of this very run, as in torch.distributed.all_gather_object; nothing here is read from a file.
        return [pickle.loads(part.numpy().tobytes()) for part in self._messages.swap(Kind.OBJECTS, sent)]

    def _broadcast(self, flat: Tensor) -> None:
        self._messages.broadcast(flat)

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Transfer:
        return send(self.group, tensor, peer, self._tag + tag)

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Transfer:
        return receive(self.group, tensor, peer, self._tag + tag)


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


def make_comm(
    group: dist.ProcessGroup | None, device: torch.device, stripe: int = 0, timeout_s: float | None = None
) -> Comm:
    """The transport for a group and the device that the params lie on.

    Args:
        group: The data-parallel group, or ``None`` for a group of one without torch.distributed.
        device: Device of the params.
        stripe: Number of this optimizer among those on the group, the same on every rank; keeps their messages apart.
        timeout_s: The longest wait for another rank; ``None`` for the group's own.

    Raises:
        LifecycleError: The group has no backend for this kind of device.
    """
    if group is None:
        return LocalComm()
    if dist.get_world_size(group) == 1:
        return LocalComm()
    native = _backend_name(group, device) != "gloo"
    comm = NativeComm(group, device) if native else GlooComm(group, device, stripe)
    comm.watch.number = stripe
    return _limited(comm, timeout_s)


def control_comm(group: dist.ProcessGroup | None, timeout_s: object = None) -> Comm:
    """The group before anything is known of the params: for control collectives only."""
    if group is None or dist.get_world_size(group) == 1:
        return LocalComm()
    cpu = torch.device("cpu")
    # A group for GPUs alone: torch itself finds the right device for objects.
    return _limited(GlooComm(group, cpu, -1) if _has_gloo(group) else NativeComm(group, cpu), timeout_s)


def _limited(comm: Comm, timeout_s: object) -> Comm:
    if isinstance(timeout_s, (int, float)) and timeout_s > 0:  # anything else is refused after the ranks have met
        comm.watch.timeout_s = float(timeout_s)
    return comm


def _has_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return _backend_name(group, torch.device("cpu")) == "gloo"
    except LifecycleError:
        return False


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError as error:
        raise LifecycleError(
            f"the process group has no backend for params on {device} ({error}); "
            "create it with one, for example init_process_group('cpu:gloo,cuda:nccl')"
        ) from error
