"""A beam search over sequences of buckets, by counts of kinds.

A state is what has been packed so far. Its buckets took from what was on hand, that is from all params up to some
position in backward order that were not packed yet; the rest waits (invariant 7 of a layout). States are ranked by
the least height that a plan through them can still have, *not* by the padding that they have so far: padding that
cannot be avoided in the end is no fault of the state that has it already.

The effort is counted in work of the filler, never in seconds: every rank must come to the same plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from freehold.plan.policies._packed.book import RecipeBook
from freehold.plan.policies._packed.fill import BIG_FIRST, LARGEST_IN, PROPORTIONAL, SMALL_FIRST
from freehold.plan.policies._packed.plans import Plans
from freehold.plan.policies._packed.recipe import Recipe
from freehold.plan.policies._packed.stock import Counts, Stock
from freehold.plan.problem import align_up

__all__ = ["EFFORTS", "Beam", "Effort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to search.

    Attributes:
        width: States kept of those that have packed about equally much.
        num_heads: Positions in backward order up to which a bucket may take, per state.
        num_heights: Shard sizes tried per position.
        modes: Ways to fill.
        percent: Its part of the work that the policy allows.
    """

    width: int
    num_heads: int
    num_heights: int
    modes: tuple[int, ...]
    percent: int


EFFORTS = (
    Effort(width=2, num_heads=3, num_heights=4, modes=(BIG_FIRST, PROPORTIONAL), percent=25),
    Effort(width=2, num_heads=4, num_heights=16, modes=(PROPORTIONAL,), percent=25),
    Effort(width=4, num_heads=8, num_heights=8, modes=(BIG_FIRST, PROPORTIONAL), percent=25),
    Effort(width=2, num_heads=4, num_heights=16, modes=(SMALL_FIRST,), percent=25),
)
"""Tried in order until the policy's limit is reached. Plans of different efforts differ in exposure and makespan."""

_HURRY = Effort(width=1, num_heads=1, num_heights=2, modes=(BIG_FIRST,), percent=0)
"""What is left of an effort once it is behind its schedule."""

_PATIENCE = 30
"""An effort that needs so many times its work is given up: hundreds of kinds in hundreds of buckets."""

_BANDS_PER_BUCKET = 4
"""Bands of packed size in the largest bucket allowed; wider than a small bucket, so that bucket_numel=1 stays cheap."""

_ENOUGH_CHILDREN = 6
"""Children without any new padding after which a state is not expanded further (half as many far from the end)."""

_FAR_BUCKETS = 3
"""With more than this many of the largest buckets left, the beam is narrow: mistakes can still be made good."""

_PAIR_HEIGHTS = 32
"""Heights of the first of two closing buckets that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    packed: Counts
    size: int
    height: int
    least: int
    head: int
    recipes: tuple[Recipe, ...]


class Beam:
    """Searches for sequences of buckets and hands what it finds to ``plans``."""

    def __init__(self, stock: Stock, plans: Plans) -> None:
        self._stock = stock
        self._plans = plans
        self._book = RecipeBook(stock)
        self._largest_bucket = stock.num_ranks * stock.most_shard_numel
        self._pairs_done: set[Counts] = set()

    @property
    def work(self) -> int:
        """Work done so far."""
        return self._book.filler.work

    def run(self, effort: Effort, total_work: int) -> None:
        """Search once, from the beginning.

        Args:
            effort: How hard.
            total_work: Work of the filler for all efforts; beyond its part, an effort hurries. Its part is spread
                evenly over the params, so that the last buckets, which decide about the padding, get theirs.
        """
        work = total_work * effort.percent // 100
        began = self.work
        stock, counts = self._stock, self._stock.counts
        start = _State(packed=(0,) * len(counts), size=0, height=0, least=stock.bound, head=0, recipes=())
        bands: dict[int, dict[Counts, _State]] = {0: {start.packed: start}}
        while bands:
            if self.work - began > _PATIENCE * work:
                return
            states = bands.pop(min(bands))
            least_size = min(state.size for state in states.values())
            late = (self.work - began) * stock.total > work * (least_size + self._largest_bucket)
            now = _HURRY if late else effort
            for state in self._kept(states, now):
                for child in self._children(state, now):
                    band = child.size * _BANDS_PER_BUCKET // self._largest_bucket
                    known = bands.setdefault(band, {})
                    other = known.get(child.packed)
                    if other is None or (child.height, child.head) < (other.height, other.head):
                        known[child.packed] = child

    def _rest(self, packed: Counts) -> Counts:
        return tuple([c - p for c, p in zip(self._stock.counts, packed, strict=True)])

    def _kept(self, states: dict[Counts, _State], effort: Effort) -> list[_State]:
        """The states of a band that are worth expanding: most of them the best, the others spread over the rest."""
        stock = self._stock

        def rank(state: _State) -> tuple[int, int, int, Counts]:
            return state.least, state.height * stock.num_ranks - state.size, state.head, state.packed

        ranked = sorted((state for state in states.values() if state.least <= self._plans.cutoff), key=rank)
        if not ranked:
            return []
        width = effort.width
        if stock.total - ranked[0].size > _FAR_BUCKETS * self._largest_bucket:
            width = min(width, 2)
        if len(ranked) <= width:
            return ranked
        best = -(-2 * width // 3)
        others = ranked[best:]
        spread = width - best
        return ranked[:best] + [others[i * len(others) // spread] for i in range(spread)]

    def _children(self, state: _State, effort: Effort) -> Iterator[_State]:
        stock = self._stock
        rest = self._rest(state.packed)
        rest_size = stock.total - state.size
        if rest_size <= self._largest_bucket:
            most = min(stock.most_shard_numel, self._plans.cutoff - state.height)
            self._finish(state, self._book.closing(rest, max(0, state.least - state.height), most))
        if effort is not _HURRY and rest_size <= 2 * self._largest_bucket:
            self._finish_in_two(state, rest, rest_size)
        enough = _ENOUGH_CHILDREN if rest_size <= _FAR_BUCKETS * self._largest_bucket else _ENOUGH_CHILDREN // 2
        perfect = 0
        for head in self._heads(state, effort.num_heads):
            seen = stock.seen(head)
            hand = tuple([c - p for c, p in zip(seen, state.packed, strict=True)])
            for recipe in self._candidates(hand, effort):
                child = self._child(state, recipe, head)
                if child is None:
                    continue
                yield child
                if recipe.shard_numel * stock.num_ranks == stock.size_of(recipe.taken):
                    perfect += 1
                    if perfect >= enough:
                        return

    def _heads(self, state: _State, most: int) -> list[int]:
        """Positions up to which a bucket may take, from just enough for a bucket to a bit more than the largest."""
        stock = self._stock
        last = len(stock.order)
        first = max(state.head, bisect_left(stock.heads, state.size + stock.least_bucket_numel))
        stop = min(last, bisect_left(stock.heads, state.size + self._largest_bucket * 115 // 100))
        if first > last:
            return []
        stop = max(first, stop)
        if most == 1 or stop == first:
            return [stop]
        return sorted({first + (stop - first) * i // (most - 1) for i in range(most)})

    def _candidates(self, hand: Counts, effort: Effort) -> Iterator[Recipe]:
        stock = self._stock
        low = -(-stock.least_bucket_numel // stock.num_ranks)
        high = min(stock.most_shard_numel, align_up(-(-stock.size_of(hand) // stock.num_ranks), stock.shard_unit))
        for height in self._book.heights(hand, low, high, effort.num_heights):
            for mode in effort.modes:
                yield from self._book.recipes(hand, height, mode)

    def _child(self, state: _State, recipe: Recipe, head: int) -> _State | None:
        stock = self._stock
        if stock.least_numel_of(recipe.taken) < stock.least_bucket_numel:
            return None
        if recipe.shard_numel > stock.most_shard_numel:
            return None
        self._book.filler.work += 3 * len(state.packed)
        size = state.size + stock.size_of(recipe.taken)
        height = state.height + recipe.shard_numel
        packed = tuple([p + t for p, t in zip(state.packed, recipe.taken, strict=True)])
        least = max(stock.bound, height + stock.least_height(self._rest(packed)))
        if least > self._plans.cutoff:
            return None
        recipes = (*state.recipes, recipe)
        if size == stock.total:
            self._plans.add(recipes, height)
            return None
        return _State(packed=packed, size=size, height=height, least=least, head=head, recipes=recipes)

    def _finish(self, state: _State, *recipes: Recipe | None) -> None:
        done: list[Recipe] = [r for r in recipes if r is not None]
        if len(done) == len(recipes) and all(r.shard_numel <= self._stock.most_shard_numel for r in done):
            height = state.height + sum(r.shard_numel for r in done)
            self._plans.add((*state.recipes, *done), height)

    def _finish_in_two(self, state: _State, rest: Counts, rest_size: int) -> None:
        """Try to close with two buckets that together are as low as can be; one after the other rarely finds those."""
        stock = self._stock
        if rest in self._pairs_done or self._plans.best <= stock.bound:
            return
        self._pairs_done.add(rest)
        target = max(state.least, state.height + stock.least_height(rest)) - state.height
        low = -(-stock.least_bucket_numel // stock.num_ranks)
        heights = self._book.heights(rest, low, min(target - 1, stock.most_shard_numel), _PAIR_HEIGHTS)
        for height in heights:
            for first in self._firsts(rest, height):
                if stock.least_numel_of(first.taken) < stock.least_bucket_numel:
                    continue
                waste = stock.num_ranks * first.shard_numel - stock.size_of(first.taken)
                if waste > stock.num_ranks * target - rest_size:
                    continue
                left = tuple([c - t for c, t in zip(rest, first.taken, strict=True)])
                second = self._all_in(left, target - first.shard_numel)
                if second is not None:
                    self._finish(state, first, second)
                    return

    def _firsts(self, rest: Counts, height: int) -> Iterator[Recipe]:
        for mode in (BIG_FIRST, LARGEST_IN):
            yield from self._book.recipes(rest, height, mode)

    def _all_in(self, counts: Counts, height: int) -> Recipe | None:
        if height <= 0 or height > self._stock.most_shard_numel:
            return None
        for recipe in self._firsts(counts, height):
            if recipe.taken == counts:
                return recipe
        return None
