"""The other policies' results, where they could be smaller than what the search found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freehold.plan.policies._greedy import absorb_runs, threshold_runs
from freehold.plan.policies._packed.deal import side_by_side
from freehold.plan.policies.absorb import absorb_policy
from freehold.plan.policies.ns_cost import ns_cost_policy
from freehold.plan.policies.threshold import threshold_policy
from freehold.plan.problem import Item, PackedBucket, Problem, align_up

__all__ = ["baselines", "by_shape", "shared_height"]

_ALWAYS_ITEMS = 2_000
"""Up to this many params the other policies are always tried; beyond, only if they could be smaller."""


def baselines(problem: Problem, height: int | None) -> list[tuple[PackedBucket, ...]]:
    """Results of ``threshold``, ``absorb`` and ``ns_cost``, the last also by the costs that it has by default.

    Args:
        problem: The problem.
        height: Sum of shard sizes that the search reached, ``None`` if it found nothing. With many params a policy
            whose membership alone needs as much is left out: whatever its packing, it cannot be smaller.
    """
    if height is None or len(problem.items) <= _ALWAYS_ITEMS:
        return [threshold_policy(problem), absorb_policy(problem), *_by_cost(problem)]
    results: list[tuple[PackedBucket, ...]] = []
    if _least_height(problem, threshold_runs(problem)) < height:
        results.append(threshold_policy(problem))
    if _least_height(problem, absorb_runs(problem)) < height:
        results += [absorb_policy(problem), *_by_cost(problem)]
    return results


def _by_cost(problem: Problem) -> list[tuple[PackedBucket, ...]]:
    counted = tuple(
        item if item.counted_cost is None else replace(item, cost=item.counted_cost) for item in problem.items
    )
    problems = [problem] if counted == problem.items else [problem, replace(problem, items=counted)]
    return [ns_cost_policy(each) for each in problems]


def by_shape(problem: Problem, buckets: Sequence[PackedBucket]) -> tuple[PackedBucket, ...]:
    """The same buckets with equal shapes next to each other inside every shard, where no stack runs through shards."""
    return tuple(_shard_by_shape(problem, bucket) for bucket in buckets)


def _shard_by_shape(problem: Problem, bucket: PackedBucket) -> PackedBucket:
    shards: dict[int, list[Item]] = {}
    for placement in bucket.placements:
        item = problem.items[placement.index]
        if item.granule_numel < item.numel:
            return bucket
        shards.setdefault(placement.rank, []).append(item)
    placements = [
        placement
        for rank, items in sorted(shards.items())
        for placement in side_by_side(items, rank=rank, start=0, alignment=problem.alignment)
    ]
    return PackedBucket(placements=tuple(placements), shard_numel=bucket.shard_numel)


def shared_height(problem: Problem, buckets: Sequence[PackedBucket]) -> int:
    """Sum of shard sizes over the buckets without isolated params."""
    return sum(b.shard_numel for b in buckets if not problem.items[b.placements[0].index].isolated)


def _least_height(problem: Problem, runs: Sequence[Sequence[Item]]) -> int:
    """Sum of shard sizes that this membership needs if every bucket were packed perfectly."""
    height = 0
    for run in runs:
        if not run[0].isolated:
            total = sum(align_up(item.numel, problem.alignment) for item in run)
            largest = max(item.granule_numel for item in run)
            height += align_up(max(-(-total // problem.num_ranks), largest), problem.shard_unit)
    return height
