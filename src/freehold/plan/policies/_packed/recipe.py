"""What a bucket consists of, by kinds: bins of matrices, and stacks laid end to end through the shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from freehold.plan.policies._packed.fill import BIG_FIRST, PROPORTIONAL, Filler, Row
from freehold.plan.policies._packed.stock import Counts, Kind, Stock
from freehold.plan.problem import align_up

__all__ = ["Pocket", "Recipe", "Run", "StackSums", "bins_recipe", "can_be_cut", "lay_runs", "stacks_recipe"]

_MAX_CHOICE_UNITS = 1 << 15
"""Stacks are chosen by exact subset sums if a bucket is at most this many times their common divisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A stack that may cross shard edges: its kind, and its address ``rank * shard_numel + offset`` in the bucket."""

    kind: int
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pocket:
    """Room that stacks leave in a shard which they touch, and what fills it."""

    address: int
    numel: int
    pattern: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A bucket by kinds.

    Attributes:
        taken: Params of each kind in it.
        shard_numel: Elements of one shard.
        rows: Bins that are whole shards. Which rank gets which is decided when costs are known.
        runs: Stacks in the order of their addresses. They begin at shard 0; the block may be moved.
        pockets: Room between and behind the runs.
        num_run_shards: Shards that runs touch.
    """

    taken: Counts
    shard_numel: int
    rows: tuple[Row, ...]
    runs: tuple[Run, ...] = ()
    pockets: tuple[Pocket, ...] = ()
    num_run_shards: int = 0


def bins_recipe(stock: Stock, filler: Filler, counts: Counts, height: int, mode: int) -> Recipe:
    """Fill every shard with whole params; those of ``counts`` that did not fit are left."""
    bins = filler.fill(counts, stock.num_ranks, height // stock.unit, mode)
    taken = tuple([c - left for c, left in zip(counts, bins.left, strict=True)])
    top = bins.top * stock.unit if stock.is_exact else max([0, *(stock.size_of(row.pattern) for row in bins.rows)])
    return Recipe(taken=taken, shard_numel=align_up(top, stock.shard_unit), rows=bins.rows)


class StackSums:
    """Which totals the stacks on hand can reach: the ways to fill a bucket of some height with them.

    Args:
        stock: The stock.
        counts: What is on hand.
        run_kinds: Kinds of stacks to be cut.
        loose: What else is on hand, to fill the room that stacks leave.
        largest: Elements of the largest bucket in question.
    """

    def __init__(self, stock: Stock, counts: Counts, run_kinds: Sequence[int], loose: Counts, largest: int) -> None:
        self._stock = stock
        self._stacks = tuple(c if i in run_kinds else 0 for i, c in enumerate(counts))
        self._loose = stock.size_of(loose)
        unit = math.gcd(*(stock.kinds[i].size for i in run_kinds))
        if largest // unit > _MAX_CHOICE_UNITS:
            unit = -(-largest // _MAX_CHOICE_UNITS)
        self._unit = unit
        # A kind that does not take part weighs more than any room, which is how the filler skips it.
        never = largest // unit + 1
        self._weights = [-(-k.size // unit) if i in run_kinds else never for i, k in enumerate(stock.kinds)]
        self.filler = Filler(self._weights)
        self._sums = self.filler.sums(self._stacks, largest // unit)[0]

    def waste(self, space: int) -> int:
        """Elements of ``space`` that neither stacks nor loose params on hand can fill, as far as sums can tell."""
        room = space // self._unit
        best = (self._sums & ((1 << (room + 1)) - 1)).bit_length() - 1
        return max(0, space - best * self._unit - self._loose)

    def choices(self, space: int) -> list[Counts]:
        """How many stacks of each kind to take: those that fill ``space``, and those that leave room for the rest."""
        targets = self._largest_sums(space, 3)
        targets += self._largest_sums(space - self._loose, 1)
        targets += self._largest_sums(space - self._loose // 2, 1)
        weight = sum(w * c for w, c in zip(self._weights, self._stacks, strict=True))
        found: list[Counts] = []
        for target in targets:
            shares = tuple([(c * target + weight // 2) // weight for c in self._stacks])
            found += [self.filler.choose(self._stacks, target, mode, shares) for mode in (BIG_FIRST, PROPORTIONAL)]
        return [choice for choice in dict.fromkeys(found) if any(choice)]

    def _largest_sums(self, space: int, count: int) -> list[int]:
        sums = self._sums & ((1 << (max(0, space) // self._unit + 1)) - 1)
        found: list[int] = []
        while sums > 1 and len(found) < count:
            top = sums.bit_length() - 1
            found.append(top)
            sums ^= 1 << top
        return found


def can_be_cut(kind: Kind, height: int) -> bool:
    """Whether a stack can be laid into shards of that height: cut at every edge, at one edge, or not at all."""
    return height % kind.granule == 0 or kind.num_granules <= 2 * (height // kind.granule)


def stacks_recipe(
    stock: Stock, filler: Filler, loose: Counts, *, stacks: Sequence[int], height: int, mode: int
) -> Recipe | None:
    """Lay ``stacks`` (kinds, in this order) through shards of ``height``, then fill what they leave from ``loose``.

    Returns:
        ``None`` if the stacks do not fit.
    """
    laid = lay_runs(stock, stacks, height)
    if laid is None:
        return None
    runs, gaps, num_run_shards = laid
    filler.work += 4 * len(stacks) + len(loose)
    left = loose
    pockets: list[Pocket] = []
    for address, numel in sorted(gaps, key=lambda gap: (gap[1], gap[0])):
        bins = filler.fill(left, 1, numel // stock.unit, mode)
        left = bins.left
        pockets += [Pocket(address=address, numel=numel, pattern=row.pattern) for row in bins.rows]
    bins = filler.fill(left, stock.num_ranks - num_run_shards, height // stock.unit, mode)
    taken = [c - rest for c, rest in zip(loose, bins.left, strict=True)]
    for run in runs:
        taken[run.kind] += 1
    return Recipe(
        taken=tuple(taken),
        shard_numel=height,
        rows=bins.rows,
        runs=tuple(runs),
        pockets=tuple(pockets),
        num_run_shards=num_run_shards,
    )


def lay_runs(stock: Stock, stacks: Sequence[int], height: int) -> tuple[list[Run], list[tuple[int, int]], int] | None:
    """Lay stacks end to end so that every shard edge falls between granules.

    Returns:
        The runs, the gaps between and behind them as (address, elements), and the number of shards touched; ``None`` if
        they need more shards than there are, or if one cannot be cut so.
    """
    runs: list[Run] = []
    gaps: list[tuple[int, int]] = []
    free = 0
    for index in stacks:
        kind = stock.kinds[index]
        start = _run_start(kind, free, height, stock.alignment)
        if start is None:
            return None
        gaps += _gaps(free, start, height)
        runs.append(Run(kind=index, address=start))
        free = align_up(start + kind.granule * kind.num_granules, stock.alignment)
        if free > stock.num_ranks * height:
            return None
    end = align_up(free, height)
    gaps += _gaps(free, end, height)
    return runs, gaps, end // height


def _run_start(kind: Kind, free: int, height: int, alignment: int) -> int | None:
    """The first address from ``free`` on at which a stack may begin."""
    edge = free + height - free % height
    numel = kind.granule * kind.num_granules
    if numel <= edge - free:
        return free
    # Granules before an edge come in lots that keep the start aligned.
    lot = math.lcm(kind.granule, alignment)
    for at in (edge, edge + height):
        before = min(at - free, height) // lot * lot
        if height % kind.granule == 0 or numel - before <= height:
            return at - before
    return None


def _gaps(start: int, stop: int, height: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        edge = min(stop, start + height - start % height)
        yield start, edge - start
        start = edge
