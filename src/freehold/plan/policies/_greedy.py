"""What the three greedy policies share: bucket membership in backward order, and packing one item at a time.

They reproduce the layouts of Megatron-LM's layer-wise optimizer offset for offset, so the order of
floating-point operations and the ways in which ties are broken are part of what they compute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from freehold.plan.problem import Item, PackedBucket, Placement, Problem, align_up

__all__ = ["FILL", "absorb_runs", "isolated_bucket", "pack_by_size", "threshold_runs"]

FILL = 0.9
"""A bucket may close at this share of ``num_ranks`` x its largest param (as in Megatron-LM's planner)."""


def threshold_runs(problem: Problem) -> list[list[Item]]:
    """Cut the backward order where a bucket is full; isolated items are runs of their own."""
    runs: list[list[Item]] = []
    current: list[Item] = []
    total = largest = 0
    for item in problem.items:
        if item.isolated:
            runs += [current, [item]]
            current, total, largest = [], 0, 0
            continue
        current.append(item)
        total += item.numel
        largest = max(largest, item.numel)
        if _is_full(problem, total, largest):
            runs.append(current)
            current, total, largest = [], 0, 0
    runs.append(current)
    return [run for run in runs if run]


def absorb_runs(problem: Problem) -> list[list[Item]]:
    """As ``threshold_runs``, but a full bucket goes on taking items that fit into its padding."""
    runs: list[list[Item]] = []
    current: list[Item] = []
    estimate = _Estimate(problem)
    for item in problem.items:
        if item.isolated:
            runs += [current, [item]]
            current, estimate = [], _Estimate(problem)
            continue
        if current and estimate.is_full() and not estimate.has_room_for(item):
            runs.append(current)
            current, estimate = [], _Estimate(problem)
        current.append(item)
        estimate.add(item)
    runs.append(current)
    return [run for run in runs if run]


def isolated_bucket(problem: Problem, item: Item) -> PackedBucket:
    """A bucket of one item, at the start of rank 0."""
    return PackedBucket(
        placements=(Placement(index=item.index, rank=0, offset=0),),
        shard_numel=align_up(item.numel, problem.shard_unit),
    )


def pack_by_size(problem: Problem, run: Iterable[Item]) -> PackedBucket:
    """Largest first, each onto the shard whose end is lowest; ties: the earlier item, the lower rank."""
    ends = [(0, rank) for rank in range(problem.num_ranks)]
    placements: list[Placement] = []
    tallest = 0
    for item in sorted(run, key=lambda item: -item.numel):
        end, rank = ends[0]
        offset = align_up(end, problem.alignment)
        placements.append(Placement(index=item.index, rank=rank, offset=offset))
        heapq.heapreplace(ends, (offset + item.numel, rank))
        tallest = max(tallest, offset + item.numel)
    return PackedBucket(placements=tuple(placements), shard_numel=align_up(tallest, problem.shard_unit))


def pack_runs_by_size(problem: Problem, cut: Callable[[Problem], list[list[Item]]]) -> tuple[PackedBucket, ...]:
    """Cut into runs, then pack each by size."""
    return tuple(
        isolated_bucket(problem, run[0]) if run[0].isolated else pack_by_size(problem, run) for run in cut(problem)
    )


def _is_full(problem: Problem, total: int, largest: int) -> bool:
    if problem.bucket_numel is None:
        return False
    return total >= max(problem.bucket_numel, int(problem.num_ranks * largest * FILL))


class _Estimate:
    """Loads of an open bucket's shards, were its items placed in backward order on the lowest load each."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._loads = [0] * problem.num_ranks
        self._highest = 0
        self._total = 0
        self._largest = 0

    def is_full(self) -> bool:
        return _is_full(self._problem, self._total, self._largest)

    def has_room_for(self, item: Item) -> bool:
        top = align_up(self._highest, self._problem.shard_unit)
        return align_up(self._loads[0], self._problem.alignment) + item.numel <= top

    def add(self, item: Item) -> None:
        load = align_up(self._loads[0], self._problem.alignment) + item.numel
        heapq.heapreplace(self._loads, load)
        self._highest = max(self._highest, load)
        self._total += item.numel
        self._largest = max(self._largest, item.numel)
