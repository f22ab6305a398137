"""The flat memory of one bucket: weights and gradients of every rank, masters and state of the own shard.

[Note: Memory]
Built bucket by bucket: a bucket's weights are packed, sent from group rank 0, and the Parameters pointed at them before
the next bucket is allocated, so wrapping never holds the weights twice. Masters and state cover the own shard up to the
end of its last slot; the padding that other ranks' taller shards force on a bucket costs them nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freehold.plan import Bucket, Slot
from freehold.runtime.comm import Comm, Pending
from freehold.runtime.gradients import GradientBuffer
from freehold.runtime.params import ManagedParam
from freehold.runtime.phases import GradPhase, WeightPhase
from freehold.runtime.shard import ShardPart, shard_parts

__all__ = ["BucketBuffers", "BucketMemory", "allocate_weights", "master_dtype", "reduction_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMemory:
    """The tensors of a bucket.

    Attributes:
        weights: ``(numel,)`` in the params' dtype; the Parameters are views of it.
        own_weights: This rank's shard of ``weights``, up to the end of its last slot.
        master: What the rules update: ``own_weights`` itself for fp32 and fp64, else an fp32 copy.
        state: The rules' state by element, by field name, each like ``master``.
        row_state: Their state by row: one value per matrix row of the own slots, in offset order, each ``(rows,)``.
        per_matrix: Their state in objects: one dict per matrix of the own slots, in offset order; empty if no rule
            keeps objects.
    """

    weights: Tensor
    own_weights: Tensor
    master: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    row_state: dict[str, Tensor] = field(default_factory=dict)
    per_matrix: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class BucketBuffers:
    """One bucket at run time.

    Attributes:
        bucket: The plan.
        params: Its params, by address.
        owned: The slots on this rank, by offset.
        parts: The same with their params and the places of their state.
        memory: Its weights, masters and state.
        grads: Its gradients.
        grad_phase: See ``GradPhase``.
        weight_phase: See ``WeightPhase``.
        missing: Gradients that the current pass still waits for.
        reducing: The reduction in flight.
        gathering: The all-gather in flight.
        carry: The own shard of earlier passes of this window.
    """

    bucket: Bucket
    params: tuple[ManagedParam, ...]
    owned: tuple[Slot, ...]
    memory: BucketMemory
    grads: GradientBuffer
    grad_phase: GradPhase = GradPhase.IDLE
    weight_phase: WeightPhase = WeightPhase.READY
    missing: int = 0
    reducing: Pending | None = None
    gathering: Pending | None = None
    carry: Tensor | None = None
    parts: tuple[ShardPart, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = shard_parts(self.owned, self.params)

    @property
    def index(self) -> int:
        """The bucket's index in the layout."""
        return self.bucket.index

    def open_grads(self) -> None:
        """Have memory for gradients, and let every param see its part."""
        if self.grads.open():
            self.show_grads()

    def show_grads(self) -> None:
        """Let every param see its part of the gradients as they lie now."""
        flat, shard_numel = self.grads.flat, self.bucket.shard_numel
        for p in self.params:
            if flat is None:
                p.grad_view = None
            else:
                start = p.slots[0].rank * shard_numel + p.slots[0].offset
                p.grad_view = flat[start : start + p.param.numel()].view(p.param.shape)

    @property
    def master_is_copy(self) -> bool:
        """Whether the weights are kept a second time, in higher precision."""
        return self.memory.master.dtype != self.memory.weights.dtype


def reduction_dtype(dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """Gradients of float64 params are reduced in float64, all others as asked."""
    return torch.float64 if dtype == torch.float64 else wanted


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Rules compute in fp32, and in float64 for float64 params."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def allocate_weights(bucket: Bucket, params: list[tuple[int, torch.nn.Parameter]], comm: Comm) -> BucketMemory:
    """Pack a bucket's params into flat memory, take group rank 0's values, and point the Parameters at it.

    Args:
        bucket: The plan.
        params: Start in the bucket's address space and Parameter, one pair each.
        comm: The group; the call is collective.
    """
    first = params[0][1]
    weights = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
    for start, param in params:
        view = weights[start : start + param.numel()].view(param.shape)
        view.copy_(param.detach())
        param.data = view
    comm.broadcast_(weights)
    owned = bucket.slots_of_rank(comm.rank)
    extent = owned[-1].offset + owned[-1].numel if owned else 0
    own_weights = comm.own_shard(weights)[:extent]
    wanted = master_dtype(first.dtype)
    return BucketMemory(
        weights=weights,
        own_weights=own_weights,
        master=own_weights if wanted == first.dtype else own_weights.to(wanted),
    )
