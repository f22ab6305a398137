"""A problem seen by kinds: params that are interchangeable for packing, counted instead of listed.

Real models have few distinct sizes, so that the search can work on vectors of counts. Which param of a kind goes where
is decided last, oldest first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from freehold.plan.problem import Item, Problem, align_up

__all__ = ["Counts", "Kind", "Stock", "take_stock"]

Counts = tuple[int, ...]
"""How many params of each kind, in the order of ``Stock.kinds``."""

_MAX_UNITS = 1 << 17
"""A shard is at most about this many units tall in the search: sizes are rounded up to units. Exact where the sizes'
common divisor allows; beyond, bit sets would become slow, and the tops of shards are measured exactly afterwards."""


_MAX_PIECES = 8
"""Largest sizes of granules that are counted as pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Params of one aligned size and one granule.

    Attributes:
        size: Elements that one param occupies, rounded up to the alignment.
        granule: Elements that must stay together; ``size`` stands for it where the param is a single granule.
        num_granules: Granules per param; 1 for a matrix, more for a stack.
        least_numel: Real elements of the smallest param of the kind.
        queue: The params, as positions in backward order, oldest first.
    """

    size: int
    granule: int
    num_granules: int
    least_numel: int
    queue: tuple[int, ...]

    @property
    def is_stack(self) -> bool:
        """Whether a param of this kind can be cut between granules."""
        return self.num_granules > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The shared (not isolated) params of a problem, by kind.

    Attributes:
        kinds: Largest first, stacks and matrices mixed.
        weights: Size of each kind in units of ``unit``, rounded up.
        unit: Elements of a unit: the greatest common divisor of the sizes, or coarser.
        is_exact: The sizes are multiples of the unit.
        num_ranks: Shards per bucket.
        alignment: Of offsets within a shard.
        shard_unit: Of shard sizes.
        step: Every shard size worth considering is a multiple of it.
        least_bucket_numel: Soft minimum of a bucket's real elements.
        most_shard_numel: Tallest shard allowed.
        total: Aligned elements of all params.
        bound: Lower bound on the sum of shard sizes.
        heads: Aligned elements of the first i params in backward order, for every i.
        order: Positions in backward order of the shared params.
        mean_costs: Mean cost of the params of each kind, rounded down.
        pieces: Sizes a, and how many whole pieces of that size the granules of one param of each kind hold; see
            ``least_height``.
    """

    kinds: tuple[Kind, ...]
    weights: tuple[int, ...]
    unit: int
    is_exact: bool
    num_ranks: int
    alignment: int
    shard_unit: int
    step: int
    least_bucket_numel: int
    most_shard_numel: int
    total: int
    bound: int
    heads: tuple[int, ...]
    order: tuple[int, ...]
    mean_costs: tuple[int, ...]
    pieces: tuple[tuple[int, Counts], ...]

    @property
    def counts(self) -> Counts:
        """All there is."""
        return tuple(len(kind.queue) for kind in self.kinds)

    def seen(self, head: int) -> Counts:
        """How many params of each kind are among the first ``head`` of the backward order."""
        if head >= len(self.order):
            return self.counts
        limit = self.order[head]
        return tuple(bisect_left(kind.queue, limit) for kind in self.kinds)

    def size_of(self, counts: Counts) -> int:
        """Aligned elements of that many params."""
        return sum(c * k.size for c, k in zip(counts, self.kinds, strict=True))

    def least_height(self, counts: Counts) -> int:
        """Sum of shard sizes that so many params need, at least: on average, and by counting large pieces."""
        least = align_up(-(-self.size_of(counts) // self.num_ranks), self.step)
        for size, pieces in self.pieces:
            held = sum([c * p for c, p in zip(counts, pieces, strict=True) if p])
            least = max(least, align_up(size * -(-held // self.num_ranks), self.shard_unit))
        return least

    def least_numel_of(self, counts: Counts) -> int:
        """Real elements of that many params, at least."""
        return sum(c * k.least_numel for c, k in zip(counts, self.kinds, strict=True))


def take_stock(problem: Problem, *, growth: tuple[int, int], bound: int) -> Stock:
    """Group the shared params of ``problem`` into kinds.

    Args:
        problem: At least one of its params is not isolated.
        growth: Largest bucket over the natural one, as a fraction (numerator, denominator).
        bound: Lower bound on the sum of shard sizes.
    """
    shared = [item for item in problem.items if not item.isolated]
    kinds = _kinds(shared, problem.alignment)
    total = sum(kind.size * len(kind.queue) for kind in kinds)
    most = _most_shard_numel(problem, kinds, growth)
    weights, unit = _weights(kinds, min(most, -(-total // problem.num_ranks) + kinds[0].size))
    exact = math.gcd(*(kind.size for kind in kinds))
    only_matrices = not any(kind.is_stack for kind in kinds)
    return Stock(
        kinds=kinds,
        weights=weights,
        unit=unit,
        is_exact=exact % unit == 0,
        num_ranks=problem.num_ranks,
        alignment=problem.alignment,
        shard_unit=problem.shard_unit,
        step=exact if only_matrices and exact % problem.shard_unit == 0 else problem.shard_unit,
        least_bucket_numel=total if problem.bucket_numel is None else problem.bucket_numel,
        most_shard_numel=most,
        total=total,
        bound=bound,
        heads=tuple(accumulate((align_up(item.numel, problem.alignment) for item in shared), initial=0)),
        order=tuple(item.index for item in shared),
        pieces=_pieces(kinds),
        mean_costs=tuple(sum(problem.items[at].cost for at in k.queue) // len(k.queue) for k in kinds),
    )


def _kinds(shared: list[Item], alignment: int) -> tuple[Kind, ...]:
    groups: dict[tuple[int, int, int], list[Item]] = {}
    for item in shared:
        size = align_up(item.numel, alignment)
        stacked = item.granule_numel < item.numel
        # Stacks are equal only if their real sizes are: granules of 65 and 64 elements cut differently.
        key = (size, item.granule_numel, item.numel // item.granule_numel) if stacked else (size, size, 1)
        groups.setdefault(key, []).append(item)
    return tuple(
        Kind(
            size=key[0],
            granule=key[1],
            num_granules=key[2],
            least_numel=min(item.numel for item in groups[key]),
            queue=tuple(item.index for item in groups[key]),
        )
        for key in sorted(groups, reverse=True)
    )


def _pieces(kinds: tuple[Kind, ...]) -> tuple[tuple[int, Counts], ...]:
    sizes = sorted({kind.granule for kind in kinds}, reverse=True)[:_MAX_PIECES]
    return tuple((size, tuple(k.num_granules * (k.granule // size) for k in kinds)) for size in sizes)


def _most_shard_numel(problem: Problem, kinds: tuple[Kind, ...], growth: tuple[int, int]) -> int:
    if problem.bucket_numel is None:
        return sum(kind.size * len(kind.queue) for kind in kinds) + problem.shard_unit
    natural = max(problem.bucket_numel, problem.num_ranks * max(kind.granule for kind in kinds))
    natural = max([natural, *(kind.size for kind in kinds if kind.is_stack)])
    # Where a shard unit is much for so small a problem, a bucket of one unit per rank must still be allowed.
    return max(natural * growth[0] // growth[1] // problem.num_ranks, problem.shard_unit)


def _weights(kinds: tuple[Kind, ...], tallest: int) -> tuple[tuple[int, ...], int]:
    unit = math.gcd(*(kind.size for kind in kinds))
    if tallest // unit > _MAX_UNITS:
        unit *= -(-tallest // (unit * _MAX_UNITS))
    return tuple(-(-kind.size // unit) for kind in kinds), unit
