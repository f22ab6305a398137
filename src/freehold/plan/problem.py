"""The two types between the planner and a policy: a packing problem of one dtype, and a packed bucket."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Item", "PackedBucket", "Placement", "Policy", "Problem", "align_up"]


def align_up(value: int, unit: int) -> int:
    """Round ``value`` up to a multiple of ``unit``."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A param as a policy sees it.

    Attributes:
        index: Position in backward order, 0 first; equal to its position in ``Problem.items``.
        numel: Elements of the whole param.
        granule_numel: Elements that must stay together; ``numel`` for a 2-D matrix, one slice for a stack.
        cost: Newton-Schulz work of the whole param (see ``freehold.plan.cost``), an int.
        isolated: It must have a bucket of its own, on rank 0.
        shape: The param's own shape, for putting equal shapes side by side.
        counted_cost: The work by ``max_min_squared``, whatever ``cost`` counts: so ``packed`` knows what ``ns_cost``
            makes of the same params by default. ``None`` means that ``cost`` is that.
    """

    index: int
    numel: int
    granule_numel: int
    cost: int
    isolated: bool
    shape: tuple[int, ...]
    counted_cost: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a policy lays out: params of one dtype and of mode ``whole``, in backward order.

    Attributes:
        items: The params in backward order.
        num_ranks: Shards per bucket, at least 1.
        bucket_numel: Soft minimum of a bucket's real elements, or ``None`` for one bucket.
        alignment: Offsets within a shard are multiples of this many elements.
        shard_unit: ``shard_numel`` is a multiple of this many elements (itself a multiple of ``alignment``).
    """

    items: tuple[Item, ...]
    num_ranks: int
    bucket_numel: int | None
    alignment: int
    shard_unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where an item begins in its bucket: ``rank`` and ``offset`` from the start of that rank's shard.

    An item of several granules runs on from there through the bucket's address space
    ``rank * shard_numel + offset`` for ``numel`` elements, over shard edges if need be.
    """

    index: int
    rank: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBucket:
    """The items of one bucket and the height of its shards, in elements (a multiple of ``Problem.shard_unit``)."""

    placements: tuple[Placement, ...]
    shard_numel: int


Policy = Callable[[Problem], tuple[PackedBucket, ...]]
"""Decides bucket membership and owners. Pure and deterministic: equal problems give equal results, on every machine."""


def shard_unit(num_ranks: int, alignment: int, *, high_busbw: bool) -> int:
    """Smallest step of a shard's size in elements.

    A bucket is a multiple of ``lcm(num_ranks, 128)`` elements (128 for vector loads of the collective; of 2**16 too
    with ``high_busbw``, for NCCL's bus bandwidth), so its shards are multiples of that over ``num_ranks``, and of
    ``alignment``. The rule is the one of Megatron-LM's distributed optimizer buffers.

    Example:
        >>> shard_unit(3, 64, high_busbw=False)
        128
    """
    multiple = math.lcm(num_ranks, 128, 2**16) if high_busbw else math.lcm(num_ranks, 128)
    return math.lcm(alignment, multiple // num_ranks)
