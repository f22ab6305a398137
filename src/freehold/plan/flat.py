"""Flat buckets: params that are updated element by element, cut wherever a shard ends."""

from __future__ import annotations

from freehold.plan.problem import Item, PackedBucket, Placement, Problem, align_up

__all__ = ["flat_buckets"]


def flat_buckets(problem: Problem) -> tuple[PackedBucket, ...]:
    """Lay params out one after the other in backward order, closing buckets at ``bucket_numel`` elements.

    All shards but the last ones are full, so that padding comes from alignment only.

    Example:
        >>> item = Item(index=0, numel=1000, granule_numel=1, cost=0, isolated=False, shape=(1000,))
        >>> problem = Problem(items=(item,), num_ranks=4, bucket_numel=None, alignment=64, shard_unit=64)
        >>> [bucket.shard_numel for bucket in flat_buckets(problem)]
        [256]
    """
    return tuple(_lay_out(problem, run) for run in _runs(problem))


def _runs(problem: Problem) -> list[list[Item]]:
    runs: list[list[Item]] = []
    current: list[Item] = []
    total = 0
    for item in problem.items:
        if item.isolated:
            runs += [current, [item]]
            current, total = [], 0
            continue
        current.append(item)
        total += item.numel
        if problem.bucket_numel is not None and total >= problem.bucket_numel:
            runs.append(current)
            current, total = [], 0
    runs.append(current)
    return [run for run in runs if run]


def _lay_out(problem: Problem, run: list[Item]) -> PackedBucket:
    addresses: list[int] = []
    end = 0
    for item in run:
        addresses.append(align_up(end, problem.alignment))
        end = addresses[-1] + item.numel
    shard_numel = align_up(-(-end // problem.num_ranks), problem.shard_unit)
    placements = tuple(
        Placement(index=item.index, rank=address // shard_numel, offset=address % shard_numel)
        for item, address in zip(run, addresses, strict=True)
    )
    return PackedBucket(placements=placements, shard_numel=shard_numel)
