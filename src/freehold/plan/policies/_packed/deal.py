"""Give a plan by kinds its params and its ranks.

Packing decides how full a bin is; which rank takes which bin costs no padding. So bins go to ranks by the cost that
has come together so far: dearest bin to the rank of least load, bucket after bucket.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from freehold.plan.policies._packed.plans import KindPlan
from freehold.plan.policies._packed.recipe import Recipe
from freehold.plan.policies._packed.snake import SnakePlace, granules_by_rank, place_runs
from freehold.plan.policies._packed.stock import Stock
from freehold.plan.problem import Item, PackedBucket, Placement, Problem, align_up

__all__ = ["Bin", "DealtBucket", "DealtPlan", "deal", "side_by_side"]


@dataclass(slots=True, kw_only=True)
class Bin:
    """A piece of a shard with whole params in it, in any order; moved between ranks while a plan is improved.

    Attributes:
        offset: From the start of the shard.
        room: Elements that are free.
        whole: It is the whole shard, so that its contents may change places with another whole shard's.
        items: What is in it.
        cost: Their cost.
    """

    offset: int
    room: int
    whole: bool
    items: list[Item] = field(default_factory=list[Item])
    cost: int = 0


@dataclass(slots=True, kw_only=True)
class DealtBucket:
    """One bucket: bins of every rank, the placements of its stacks, and its real elements."""

    shard_numel: int
    real_numel: int
    bins: list[list[Bin]]
    runs: list[Placement] = field(default_factory=list[Placement])


@dataclass(slots=True, kw_only=True)
class DealtPlan:
    """All buckets in the order in which they are ready, and the cost of every rank."""

    buckets: list[DealtBucket]
    loads: list[int]

    def packed(self, stock: Stock) -> tuple[PackedBucket, ...]:
        """As the planner wants it: in order of readiness, and within a bin equal shapes next to each other."""
        packed = [_packed_bucket(bucket, stock) for bucket in self.buckets]
        return tuple(sorted(packed, key=lambda bucket: max(p.index for p in bucket.placements)))


def deal(problem: Problem, stock: Stock, plan: KindPlan) -> DealtPlan:
    """Name the params (oldest first), and deal bins to ranks."""
    loads = [0] * stock.num_ranks
    for item in problem.items:
        if item.isolated:
            loads[0] += item.cost
    named = _named(problem, stock, plan)
    dealt = [_deal_bucket(stock, recipe, items, loads) for recipe, items in zip(plan.recipes, named, strict=True)]
    order = sorted(range(len(dealt)), key=lambda b: plan.ready[b])
    return DealtPlan(buckets=[dealt[b] for b in order], loads=loads)


def _named(problem: Problem, stock: Stock, plan: KindPlan) -> list[list[list[Item]]]:
    """Params of each bucket and kind, in the order in which buckets took them."""
    used = [0] * len(stock.kinds)
    named: list[list[list[Item]]] = []
    for recipe in plan.recipes:
        bucket: list[list[Item]] = []
        for i, taken in enumerate(recipe.taken):
            bucket.append([problem.items[at] for at in stock.kinds[i].queue[used[i] : used[i] + taken]])
            used[i] += taken
        named.append(bucket)
    return named


def _deal_bucket(stock: Stock, recipe: Recipe, items: list[list[Item]], loads: list[int]) -> DealtBucket:
    height = recipe.shard_numel
    bins: list[list[Bin]] = [[] for _ in range(stock.num_ranks)]
    open_bins: list[tuple[int, Bin, tuple[int, ...]]] = []
    real_numel = sum(item.numel for of_kind in items for item in of_kind)
    bucket = DealtBucket(shard_numel=height, real_numel=real_numel, bins=bins)
    free_ranks = range(stock.num_ranks)
    if recipe.runs:
        place = place_runs(stock, recipe, loads)
        free_ranks = place.free_ranks
        _put_runs(bucket, place, items, loads)
        for pocket in place.pockets:
            opened = Bin(offset=pocket.offset, room=pocket.numel, whole=False)
            open_bins.append((pocket.rank, opened, pocket.pattern))
    ranks = sorted(free_ranks, key=lambda rank: (loads[rank], rank))
    patterns = [row.pattern for row in recipe.rows for _ in range(row.num_bins)]
    worth = {p: sum(n * c for n, c in zip(p, stock.mean_costs, strict=True)) for p in set(patterns)}
    patterns.sort(key=lambda pattern: -worth[pattern])
    empty = (0,) * len(stock.kinds)
    patterns += [empty] * (len(ranks) - len(patterns))
    open_bins += [(rank, Bin(offset=0, room=height, whole=True), p) for rank, p in zip(ranks, patterns, strict=True)]
    for rank, opened, _ in open_bins:
        bins[rank].append(opened)
    _fill_bins(stock, open_bins, items, loads)
    return bucket


def _put_runs(bucket: DealtBucket, place: SnakePlace, items: list[list[Item]], loads: list[int]) -> None:
    height = bucket.shard_numel
    next_of = [0] * len(items)
    for run in place.runs:
        item, address = items[run.kind][next_of[run.kind]], run.address
        next_of[run.kind] += 1
        bucket.runs.append(Placement(index=item.index, rank=address // height, offset=address % height))
        count = item.numel // item.granule_numel
        for rank, granules in granules_by_rank(address, item.granule_numel, count, height):
            loads[rank] += granules * (item.cost // count)
    for kind, used in enumerate(next_of):
        del items[kind][:used]


def _fill_bins(
    stock: Stock, open_bins: list[tuple[int, Bin, tuple[int, ...]]], items: list[list[Item]], loads: list[int]
) -> None:
    """Put params into bins by pattern: kinds whose params all cost the same first, the others where load is least."""
    for kind, waiting in enumerate(items):
        if not waiting:
            continue
        size = stock.kinds[kind].size
        wanted = [(rank, opened, pattern[kind]) for rank, opened, pattern in open_bins if pattern[kind]]
        if len({item.cost for item in waiting}) == 1:
            cost, start = waiting[0].cost, 0
            for rank, opened, count in wanted:
                opened.items += waiting[start : start + count]
                opened.room -= size * count
                opened.cost += cost * count
                loads[rank] += cost * count
                start += count
    for kind, waiting in enumerate(items):
        if len({item.cost for item in waiting}) > 1:
            wanted = [(rank, opened, pattern[kind]) for rank, opened, pattern in open_bins if pattern[kind]]
            _fill_by_load(stock.kinds[kind].size, waiting, wanted, loads)


def _fill_by_load(size: int, waiting: list[Item], wanted: list[tuple[int, Bin, int]], loads: list[int]) -> None:
    heap = [(loads[rank], n, count) for n, (rank, _, count) in enumerate(wanted)]
    heapq.heapify(heap)
    for item in sorted(waiting, key=lambda item: (-item.cost, item.index)):
        _, n, left = heap[0]
        rank, opened, _ = wanted[n]
        opened.items.append(item)
        opened.room -= size
        opened.cost += item.cost
        loads[rank] += item.cost
        if left > 1:
            heapq.heapreplace(heap, (loads[rank], n, left - 1))
        else:
            heapq.heappop(heap)


def _packed_bucket(bucket: DealtBucket, stock: Stock) -> PackedBucket:
    placements = list(bucket.runs)
    for rank, bins in enumerate(bucket.bins):
        for one in bins:
            placements += side_by_side(one.items, rank=rank, start=one.offset, alignment=stock.alignment)
    return PackedBucket(placements=tuple(placements), shard_numel=bucket.shard_numel)


def side_by_side(items: Iterable[Item], *, rank: int, start: int, alignment: int) -> Iterator[Placement]:
    """Whole params one after the other in a shard, the largest first and equal shapes next to each other."""
    offset = start
    for item in sorted(items, key=lambda item: (-item.numel, item.shape, item.index)):
        yield Placement(index=item.index, rank=rank, offset=offset)
        offset = align_up(offset + item.numel, alignment)
