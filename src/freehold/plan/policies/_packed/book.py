"""The buckets that could be made of what is on hand: candidate heights, and recipes at a height."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from freehold.plan.policies._packed.fill import BIG_FIRST, MODES, Filler
from freehold.plan.policies._packed.recipe import Recipe, StackSums, bins_recipe, can_be_cut, stacks_recipe
from freehold.plan.policies._packed.stock import Counts, Stock
from freehold.plan.problem import align_up

__all__ = ["RecipeBook"]

_MAX_HEIGHT_BITS = 1 << 18
"""Heights are read from a bit set of at most this many bits."""

_LOOSE_PARTS = 4
"""A stack of which this many fit into a shard is packed whole, like a matrix."""

_MAX_RUN_UNITS = 4
"""Granules of stacks whose multiples are tried as heights."""

_MAX_RUN_HEIGHTS = 256
"""Heights for stacks that are looked at before the best ones are tried."""

_MAX_CLOSING_HEIGHTS = 512
"""Heights of a closing bucket among which is searched."""

_MAX_CLOSING_TRIES = 24
"""Heights of a closing bucket that are tried in order; beyond, the eight lowest and then bisection."""


class RecipeBook:
    """Makes recipes from counts, and remembers them."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self.filler = Filler(stock.weights)
        self._stack_kinds = tuple(i for i, kind in enumerate(stock.kinds) if kind.is_stack)
        self._recipes: dict[tuple[Counts, int, int], tuple[Recipe, ...]] = {}
        self._closings: dict[tuple[Counts, int, int], Recipe | None] = {}

    def heights(self, counts: Counts, low: int, high: int, most: int) -> list[int]:
        """Shard sizes worth trying from ``low`` to ``high``, tallest first; about ``most`` of each sort.

        They are sums that whole rows across the ranks can reach, among them multiples of what there is most of, and
        heights at which stacks can be cut.
        """
        stock = self._stock
        rows = tuple(-(-c // stock.num_ranks) for c in self._loose(counts, high))
        chosen = {align_up(s, stock.shard_unit) for s in _some(self._bits(rows, low, high), most, stock.unit)}
        plenty = max(range(len(rows)), key=lambda i: rows[i] * stock.kinds[i].size)
        size = stock.kinds[plenty].size
        chosen.update(_thinned(range(align_up(max(low, 1), size), high + 1, size), -(-most // 2)))
        chosen = {height for height in chosen if low <= height <= high}
        for unit in self._run_units(counts):
            chosen.update(self._run_heights(counts, unit, low, high, most))
        return sorted(chosen, reverse=True)

    def _run_heights(self, counts: Counts, unit: int, low: int, high: int, most: int) -> list[int]:
        """Multiples of ``unit`` at which the stacks on hand waste least."""
        tries = _thinned(range(align_up(max(low, 1), unit), high + 1, unit), _MAX_RUN_HEIGHTS)
        if len(tries) <= most:
            return tries
        kinds = [i for i in self._stack_kinds if counts[i] and unit % self._stock.kinds[i].granule == 0]
        loose = self._loose(counts, tries[-1])
        kinds = [i for i in kinds if not loose[i]]
        if not kinds:
            return []
        sums = StackSums(self._stock, counts, kinds, loose, self._stock.num_ranks * tries[-1])
        self.filler.work += sums.filler.work + 2 * len(tries)
        waste = {height: sums.waste(self._stock.num_ranks * height) for height in tries}
        best = sorted(tries, key=lambda height: (waste[height], height))[: 4 * most]
        perfect = [height for height in sorted(best) if not waste[height]]
        return _thinned(perfect, most) if len(perfect) >= most else best[:most]

    def recipes(self, counts: Counts, height: int, mode: int) -> tuple[Recipe, ...]:
        """Buckets of that height (or a bit lower) from what is on hand, most filled first."""
        key = (counts, height, mode)
        found = self._recipes.get(key)
        if found is None:
            self.filler.work += 2 * len(counts)
            found = self._recipes[key] = tuple(self._make(counts, height, mode))
        return found

    def closing(self, counts: Counts, least: int, most: int) -> Recipe | None:
        """One bucket that takes everything that is left, as low as can be found between two shard sizes."""
        key = (counts, least, most)
        if key not in self._closings:
            self._closings[key] = self._close(counts, least, most)
        return self._closings[key]

    def _loose(self, counts: Counts, height: int) -> Counts:
        """What goes into one shard each: matrices, and stacks small enough that it is not worth cutting them."""
        small = height // _LOOSE_PARTS
        pairs = zip(counts, self._stock.kinds, strict=True)
        return tuple([0 if kind.is_stack and kind.size > small else count for count, kind in pairs])

    def _bits(self, counts: Counts, low: int, high: int) -> tuple[int, int]:
        """Sums of sizes that ``counts`` can reach between the two, as bits, and the sum of bit 0, in units."""
        unit = self._stock.unit
        first, last = -(-low // unit), high // unit
        if last < first or last > _MAX_HEIGHT_BITS:
            return 0, first
        return self.filler.sums(counts, last)[0] >> first, first

    def _run_units(self, counts: Counts) -> list[int]:
        """Shards may cross stacks of many granules only at multiples of these: of what there is most of, and of all."""
        stock = self._stock
        totals: dict[int, int] = {}
        for i in self._stack_kinds:
            if counts[i]:
                kind = stock.kinds[i]
                totals[kind.granule] = totals.get(kind.granule, 0) + counts[i] * kind.size
        if not totals:
            return []
        granules = sorted(totals, key=lambda granule: (-totals[granule], granule))
        units = {math.lcm(granule, stock.shard_unit) for granule in granules[:_MAX_RUN_UNITS]}
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
        loose = self._loose(counts, height)
        runs = [i for i in self._stack_kinds if counts[i] > loose[i] and can_be_cut(stock.kinds[i], height)]
        if not runs:
            return
        sums = StackSums(stock, counts, runs, loose, stock.num_ranks * height)
        choices = sums.choices(stock.num_ranks * height)
        self.filler.work += sums.filler.work
        for choice in choices:
            stacks = [i for i in runs for _ in range(choice[i])]
            recipe = stacks_recipe(stock, self.filler, loose, stacks=stacks, height=height, mode=mode)
            if recipe is not None:
                yield recipe

    def _close(self, counts: Counts, least: int, most: int) -> Recipe | None:
        stock = self._stock
        largest = max(kind.granule for c, kind in zip(counts, stock.kinds, strict=True) if c)
        floor = max(-(-stock.size_of(counts) // stock.num_ranks), largest)
        low = max(floor, least)
        if any(counts[i] for i in self._stack_kinds):
            return self._close_stacks(counts, low, most)
        # Bins as full as can be are each above the mean, or everything fits: this height is always enough.
        enough = align_up(floor + largest + stock.unit, stock.shard_unit) + stock.shard_unit
        return self._close_bins(counts, low, min(most, enough)) if low <= most else None

    def _close_bins(self, counts: Counts, low: int, high: int) -> Recipe | None:
        stock = self._stock
        sums = _some(self._bits(counts, low, high), _MAX_CLOSING_HEIGHTS, stock.unit)
        heights = sorted({h for s in sums if (h := align_up(s, stock.shard_unit)) <= high}) or [high]
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

    def _close_stacks(self, counts: Counts, low: int, most: int) -> Recipe | None:
        stock = self._stock
        heights: set[int] = set()
        for unit in [stock.shard_unit, *self._run_units(counts)]:
            start = align_up(low, unit)
            heights.update(range(start, min(most, start + 8 * unit) + 1, unit))
            heights.update(range(start, min(most, 2 * start) + 1, align_up(start // 8, unit)))
        for height in sorted(heights):
            if (recipe := self._all_in(counts, height, (BIG_FIRST,))) is not None:
                return recipe
            loose = self._loose(counts, height)
            kinds = [i for i in self._stack_kinds if counts[i] > loose[i]]
            for order in [kinds, kinds[::-1]] if len(kinds) > 1 else [kinds]:
                stacks = [i for i in order for _ in range(counts[i])]
                for mode in MODES:
                    found = stacks_recipe(stock, self.filler, loose, stacks=stacks, height=height, mode=mode)
                    if found is None:
                        break
                    if found.taken == counts:
                        return found
        return None


def _some(sums: tuple[int, int], most: int, unit: int) -> list[int]:
    """Elements of at most about ``most`` of the sums: all, or the two lowest, the two highest, and evenly between."""
    bits, first = sums
    if bits.bit_count() <= most:
        text = bin(bits)[:1:-1]
        return [(first + at) * unit for at, digit in enumerate(text) if digit == "1"]
    top = bits.bit_length() - 1
    found: set[int] = set()
    for i in range(most):
        at = top * i // most
        rest = bits >> at
        found.add(at + (rest & -rest).bit_length() - 1)
    second = bits & (bits - 1)
    found.add((second & -second).bit_length() - 1)
    found.update((top, (bits ^ (1 << top)).bit_length() - 1))
    return [(first + at) * unit for at in sorted(found)]


def _thinned(values: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the sorted values: the two lowest, the two highest, and evenly between."""
    if len(values) <= most:
        return list(values)
    last = len(values) - 1
    even = {i * last // (most - 1) for i in range(most)} if most > 1 else {last}
    return [values[i] for i in sorted(even | {1, last - 1} if most > 3 else even)]
