"""The buckets that could be made of what is on hand: candidate heights, and recipes at a height."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from freehold.plan.policies._packed.fill import BIG_FIRST, MODES, Filler
from freehold.plan.policies._packed.recipe import Recipe, bins_recipe, run_choices, stacks_recipe
from freehold.plan.policies._packed.stock import Counts, Stock
from freehold.plan.problem import align_up

__all__ = ["RecipeBook"]

_MAX_HEIGHT_BITS = 1 << 18
"""Heights are read from a bit set of at most this many bits."""

_MAX_CLOSING_TRIES = 24
"""Heights of a closing bucket that are tried in order; beyond, the eight lowest and then bisection."""


class RecipeBook:
    """Makes recipes from counts, and remembers them."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self.filler = Filler(stock.weights)
        self._stack_kinds = tuple(i for i, kind in enumerate(stock.kinds) if kind.is_stack)
        self._recipes: dict[tuple[Counts, int, int], tuple[Recipe, ...]] = {}
        self._closings: dict[tuple[Counts, int], Recipe | None] = {}

    def heights(self, counts: Counts, low: int, high: int, most: int) -> list[int]:
        """Shard sizes worth trying from ``low`` to ``high``, tallest first: whole rows across the ranks, and heights
        at which stacks can be cut; the sums that rows can reach, thinned to ``most``."""
        stock = self._stock
        rows = tuple(-(-c // stock.num_ranks) for c in self._loose(counts))
        found = {align_up(s, stock.shard_unit) for s in self._bits(rows, low, high)}
        chosen = set(_thinned(sorted(h for h in found if low <= h <= high), most))
        for unit in self._run_units(counts):
            chosen.update(_thinned(list(range(align_up(low, unit), high + 1, unit)), most))
        return sorted(chosen, reverse=True)

    def recipes(self, counts: Counts, height: int, mode: int) -> tuple[Recipe, ...]:
        """Buckets of that height (or a bit lower) from what is on hand, most filled first."""
        key = (counts, height, mode)
        found = self._recipes.get(key)
        if found is None:
            found = self._recipes[key] = tuple(self._make(counts, height, mode))
        return found

    def closing(self, counts: Counts, least: int) -> Recipe | None:
        """One bucket that takes everything that is left, as low as can be found from a shard size of ``least`` on."""
        key = (counts, least)
        if key not in self._closings:
            self._closings[key] = self._close(counts, least)
        return self._closings[key]

    def _loose(self, counts: Counts) -> Counts:
        return tuple(0 if self._stock.kinds[i].is_stack else c for i, c in enumerate(counts))

    def _bits(self, counts: Counts, low: int, high: int) -> list[int]:
        """Sums of sizes that ``counts`` can reach between the two, in elements."""
        unit = self._stock.unit
        first, last = -(-low // unit), high // unit
        if last < first or last > _MAX_HEIGHT_BITS:
            return []
        bits = self.filler.sums(counts, last)[0] >> first
        text = bin(bits)[:1:-1]
        found: list[int] = []
        at = text.find("1")
        while at >= 0:
            found.append((first + at) * unit)
            at = text.find("1", at + 1)
        return found

    def _run_units(self, counts: Counts) -> list[int]:
        """Shards may cross stacks of many granules only at multiples of these."""
        stock = self._stock
        granules = [stock.kinds[i].granule for i in self._stack_kinds if counts[i]]
        if not granules:
            return []
        units = {math.lcm(g, stock.shard_unit) for g in granules}
        units.add(math.lcm(*granules, stock.shard_unit))
        return sorted(units)

    def _make(self, counts: Counts, height: int, mode: int) -> Iterator[Recipe]:
        stock = self._stock
        small = tuple(
            0 if kind.is_stack and kind.size > height else c for c, kind in zip(counts, stock.kinds, strict=True)
        )
        if any(small):
            yield bins_recipe(stock, self.filler, small, height, mode)
        if height % stock.shard_unit:
            return
        loose = self._loose(counts)
        run_kinds = [i for i in self._stack_kinds if counts[i]]
        for choice in run_choices(stock, counts, run_kinds, height):
            stacks = [i for i in run_kinds for _ in range(choice[i])]
            recipe = stacks_recipe(stock, self.filler, loose, stacks=stacks, height=height, mode=mode)
            if recipe is not None:
                yield recipe

    def _close(self, counts: Counts, least: int) -> Recipe | None:
        stock = self._stock
        largest = max(kind.granule for c, kind in zip(counts, stock.kinds, strict=True) if c)
        floor = max(-(-stock.size_of(counts) // stock.num_ranks), largest)
        low = max(floor, least)
        high = min(stock.most_shard_numel, align_up(low + largest + stock.unit, stock.shard_unit) + stock.shard_unit)
        if any(counts[i] for i in self._stack_kinds):
            return self._close_stacks(counts, low)
        return self._close_bins(counts, low, high)

    def _close_bins(self, counts: Counts, low: int, high: int) -> Recipe | None:
        stock = self._stock
        sums = {align_up(s, stock.shard_unit) for s in self._bits(counts, low, high)}
        heights = sorted(h for h in sums if h <= high) or [high]
        tries = heights if len(heights) <= _MAX_CLOSING_TRIES else heights[:8]
        for height in tries:
            recipe = self._all_in(counts, height, MODES)
            if recipe is not None:
                return recipe
        first, last = len(tries), len(heights) - 1
        best: Recipe | None = None
        while first <= last:
            middle = (first + last) // 2
            recipe = self._all_in(counts, heights[middle], MODES)
            if recipe is None:
                first = middle + 1
            else:
                best, last = recipe, middle - 1
        return best

    def _all_in(self, counts: Counts, height: int, modes: Sequence[int]) -> Recipe | None:
        for mode in modes:
            recipe = bins_recipe(self._stock, self.filler, counts, height, mode)
            if recipe.taken == counts:
                return recipe
        return None

    def _close_stacks(self, counts: Counts, low: int) -> Recipe | None:
        stock = self._stock
        heights: set[int] = set()
        for unit in [stock.shard_unit, *self._run_units(counts)]:
            start = align_up(low, unit)
            heights.update(range(start, min(stock.most_shard_numel, start + 8 * unit) + 1, unit))
            heights.update(range(start, min(stock.most_shard_numel, 2 * start) + 1, max(unit, align_up(start // 8, unit))))
        kinds = [i for i in self._stack_kinds if counts[i]]
        orders = [kinds, kinds[::-1]] if len(kinds) > 1 else [kinds]
        for height in sorted(heights):
            if height > stock.most_shard_numel:
                break
            if (recipe := self._all_in(counts, height, (BIG_FIRST,))) is not None:
                return recipe
            for order in orders:
                stacks = [i for i in order for _ in range(counts[i])]
                for mode in MODES:
                    found = stacks_recipe(
                        stock, self.filler, self._loose(counts), stacks=stacks, height=height, mode=mode
                    )
                    if found is None:
                        break
                    if found.taken == counts:
                        return found
        return None


def _thinned(values: list[int], most: int) -> list[int]:
    """At most ``most`` of the sorted values: the two lowest, the two highest, and evenly between."""
    if len(values) <= most:
        return values
    last = len(values) - 1
    even = {i * last // (most - 1) for i in range(most)} if most > 1 else {last}
    return [values[i] for i in sorted(even | {1, last - 1} if most > 3 else even)]
