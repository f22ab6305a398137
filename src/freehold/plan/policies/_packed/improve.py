"""Even out the cost of the ranks of a dealt plan, at the same padding.

The dearest rank gives something away, such that the dearer of the two ranks becomes least dear: a whole shard for a
whole shard of the same bucket, a param where there is room in that bucket or a later one, or a param for others that
take its place. Sizes of shards stay as they are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from freehold.plan.policies._packed.deal import Bin, DealtPlan
from freehold.plan.policies._packed.stock import Stock
from freehold.plan.problem import Item, align_up

__all__ = ["improve"]

_NUM_PARTNERS = 24
"""Least loaded ranks that are asked to take something."""

_NUM_PARTNERS_FOR_ITEMS = 6
"""The same for exchanges of single params, of which there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """An exchange between bins of two ranks: what the first gives for what it gets."""

    peak: int
    rank: int
    partner: int
    bin: Bin
    partner_bin: Bin
    given: tuple[Item, ...]
    taken: tuple[Item, ...]
    buckets: tuple[int, int]


def improve(plan: DealtPlan, stock: Stock, *, target: int, work: int) -> None:
    """Exchange until the dearest rank is at ``target``, nothing helps any more, or ``work`` exchanges were looked at.

    Args:
        plan: Changed in place.
        stock: What it was made of.
        target: Cost at which to stop.
        work: Exchanges to look at, at most.
    """
    _Improver(plan, stock, work).run(target)


class _Improver:
    def __init__(self, plan: DealtPlan, stock: Stock, work: int) -> None:
        self._plan = plan
        self._loads = plan.loads
        self._alignment = stock.alignment
        self._least_numel = stock.least_bucket_numel
        self._work = work
        self._ranked = sorted((load, rank) for rank, load in enumerate(self._loads))
        self._with_room: dict[tuple[int, int], list[tuple[int, int, int]]] = {}

    def run(self, target: int) -> None:
        while self._work > 0 and self._ranked[-1][0] > target:
            load, rank = self._ranked[-1]
            move = self._best(chain(self._gifts(rank), self._whole_swaps(rank)), load)
            if move is None:
                move = self._best(self._item_moves(rank), load)
            if move is None:
                return
            self._apply(move)

    def _best(self, moves: Iterator[_Move], load: int) -> _Move | None:
        best: _Move | None = None
        for move in moves:
            if move.peak < (best.peak if best else load):
                best = move
        return best

    def _gifts(self, rank: int) -> Iterator[_Move]:
        """Give one param to the least loaded rank that has room for it, in the same bucket or in a later one.

        A later bucket is ready later than the param is, which is allowed; the bucket it leaves must stay large enough.
        """
        buckets = self._plan.buckets
        for source in range(len(buckets) - 1, -1, -1):
            for mine in buckets[source].bins[rank]:
                for given in _classes(mine).values():
                    found = self._best_room(source, self._size(given[0]), given[0].numel)
                    if found is None or found[1] == rank:
                        continue
                    target, partner, theirs = found
                    cost = given[0].cost
                    yield _Move(
                        peak=max(self._loads[rank] - cost, self._loads[partner] + cost),
                        rank=rank,
                        partner=partner,
                        bin=mine,
                        partner_bin=theirs,
                        given=(given[0],),
                        taken=(),
                        buckets=(source, target),
                    )

    def _best_room(self, source: int, size: int, numel: int) -> tuple[int, int, Bin] | None:
        """Bucket, rank and bin with room for ``size`` at the least loaded rank, from bucket ``source`` on."""
        best: tuple[int, int, Bin] | None = None
        buckets = self._plan.buckets
        stop = len(buckets) if buckets[source].real_numel - numel >= self._least_numel else source + 1
        for target in range(source, stop):
            self._work -= 1
            found = self._least_loaded_with_room(target, size)
            if found is not None and (best is None or self._loads[found[0]] < self._loads[best[1]]):
                best = (target, *found)
        return best

    def _least_loaded_with_room(self, index: int, size: int) -> tuple[int, Bin] | None:
        """Rank and bin of the bucket; the heap's entries are put right when they come to its top."""
        bins = self._plan.buckets[index].bins
        heap = self._with_room.get((index, size))
        if heap is None:
            heap = [
                (self._loads[rank], rank, at)
                for rank, of_rank in enumerate(bins)
                for at, one in enumerate(of_rank)
                if one.room >= size
            ]
            heapq.heapify(heap)
            self._with_room[index, size] = heap
        while heap:
            load, rank, at = heap[0]
            if bins[rank][at].room < size:
                heapq.heappop(heap)
            elif load != self._loads[rank]:
                heapq.heapreplace(heap, (self._loads[rank], rank, at))
            else:
                return rank, bins[rank][at]
        return None

    def _whole_swaps(self, rank: int) -> Iterator[_Move]:
        loads = self._loads
        best = loads[rank]
        for _, partner in self._ranked[:_NUM_PARTNERS]:
            gap = loads[rank] - loads[partner]
            for index, bucket in enumerate(self._plan.buckets):
                self._work -= 1
                mine, theirs = bucket.bins[rank], bucket.bins[partner]
                if not (len(mine) == len(theirs) == 1 and mine[0].whole and theirs[0].whole):
                    continue
                shift = mine[0].cost - theirs[0].cost
                peak = max(loads[rank] - shift, loads[partner] + shift)
                if 0 < shift < gap and peak < best:
                    best = peak
                    yield _Move(
                        peak=peak,
                        rank=rank,
                        partner=partner,
                        bin=mine[0],
                        partner_bin=theirs[0],
                        given=tuple(mine[0].items),
                        taken=tuple(theirs[0].items),
                        buckets=(index, index),
                    )

    def _item_moves(self, rank: int) -> Iterator[_Move]:
        for _, partner in self._ranked[:_NUM_PARTNERS_FOR_ITEMS]:
            for index, bucket in enumerate(self._plan.buckets):
                for mine in bucket.bins[rank]:
                    for theirs in bucket.bins[partner]:
                        yield from self._between(index, rank, mine, partner, theirs)

    def _between(self, index: int, rank: int, mine: Bin, partner: int, theirs: Bin) -> Iterator[_Move]:
        """Give one param for one, or for as many as fill its place."""
        loads = self._loads
        gap = loads[rank] - loads[partner]
        others = _classes(theirs)
        for given in _classes(mine).values():
            size, cost = self._size(given[0]), given[0].cost
            options: list[list[Item]] = []
            for other in others.values():
                other_size = self._size(other[0])
                counts = {1, size // other_size} if size > other_size else {1}
                options += [other[:n] for n in counts if n <= len(other)]
            for taken in options:
                self._work -= 1
                taken_size = sum(self._size(item) for item in taken)
                shift = cost - sum(item.cost for item in taken)
                if 0 < shift < gap and size - taken_size <= theirs.room and taken_size - size <= mine.room:
                    peak = max(loads[rank] - shift, loads[partner] + shift)
                    yield _Move(
                        peak=peak,
                        rank=rank,
                        partner=partner,
                        bin=mine,
                        partner_bin=theirs,
                        given=(given[0],),
                        taken=tuple(taken),
                        buckets=(index, index),
                    )

    def _size(self, item: Item) -> int:
        return align_up(item.numel, self._alignment)

    def _apply(self, move: _Move) -> None:
        given, taken = set(move.given), set(move.taken)
        for rank in (move.rank, move.partner):
            del self._ranked[bisect_left(self._ranked, (self._loads[rank], rank))]
        shift = sum(item.cost for item in move.given) - sum(item.cost for item in move.taken)
        size = sum(map(self._size, move.given)) - sum(map(self._size, move.taken))
        move.bin.items = [item for item in move.bin.items if item not in given] + list(move.taken)
        move.partner_bin.items = [item for item in move.partner_bin.items if item not in taken] + list(move.given)
        moved = sum(item.numel for item in move.given) - sum(item.numel for item in move.taken)
        for index, sign in zip(move.buckets, (-1, 1), strict=True):
            self._plan.buckets[index].real_numel += sign * moved
        for one, rank, sign in ((move.bin, move.rank, -1), (move.partner_bin, move.partner, 1)):
            one.cost += sign * shift
            one.room -= sign * size
            self._loads[rank] += sign * shift
            insort(self._ranked, (self._loads[rank], rank))


def _classes(one: Bin) -> dict[tuple[int, int], list[Item]]:
    """Params of a bin that are equal in size and cost."""
    classes: dict[tuple[int, int], list[Item]] = {}
    for item in one.items:
        classes.setdefault((item.numel, item.cost), []).append(item)
    return classes
