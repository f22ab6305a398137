"""A bound from a linear program: how many bins of a given height do these granules need, if bins could be split?

The simple bounds look at sums; they cannot see that, say, no choice of the sizes 28, 14, 5 and 4 without a gap leaves
the right numbers of each for the other bins. The linear program of Gilmore and Gomory ("A linear programming approach
to the cutting-stock problem", 1961) can: it minimises the number of bins over all patterns, fractions allowed. Its dual
is a price for each size such that no bin is worth more than 1, and any such prices are a proof: what costs more than
N bins are worth does not fit into N. Here the program is solved by column generation with exact fractions, the prices
are rounded down to integers, and what is *used* is only the proof, checked by an integer knapsack for every height.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

__all__ = ["pattern_bound"]

_SCALE = 1 << 20
"""Prices are multiples of 1 / _SCALE."""

_MAX_PIVOTS = 120
"""Pivots per height; what is proved by then counts."""

_MAX_PER_BIN = 64
"""Granules per bin on average, beyond which the mean decides and the program has nothing to add."""

_MAX_CELLS = 1 << 21
"""Cells of all knapsack tables together; a table has one per kind and unit of height."""

_MAX_TABLE_CELLS = 1 << 17
"""Cells of one table."""


def pattern_bound(sizes: Sequence[int], counts: Sequence[int], num_bins: int, low: int) -> int:
    """Least height, from ``low`` up, at which the program does not prove that ``num_bins`` bins are too few.

    Args:
        sizes: Distinct sizes of the granules, as small integers (divide by their common divisor first).
        counts: How many of each.
        num_bins: Number of bins.
        low: A height known to be a lower bound, at least the largest size.

    Returns:
        A lower bound on the height of ``num_bins`` bins that hold everything; ``low`` if the program would be too large
        or of no use.

    Example:
        Sizes 28, 14, 5 and 4, 80 of each, in 128 bins: 31.9 on average, but 32 is not enough.

        >>> pattern_bound((28, 14, 5, 4), (80, 80, 80, 80), 128, 32)
        33
    """
    height = low
    cells = 0
    if sum(counts) > _MAX_PER_BIN * num_bins:
        return low
    while True:
        cost = len(sizes) * (height + 1)
        if cost > _MAX_TABLE_CELLS or cells > _MAX_CELLS:
            return height
        proved, pivots = _proved_too_low(sizes, counts, num_bins, height)
        cells += pivots * cost
        if proved == height:
            return height
        height = proved


def _proved_too_low(sizes: Sequence[int], counts: Sequence[int], num_bins: int, height: int) -> tuple[int, int]:
    """The next height after ``height`` that is not proved too low (itself, if nothing is proved), and pivots done."""
    program = _Program(sizes, counts, height)
    for pivot in range(1, _MAX_PIVOTS + 1):
        prices = program.prices()
        if min(prices) < 0:
            program.enter([-1 if t == prices.index(min(prices)) else 0 for t in range(len(sizes))], 0)
            continue
        whole = [int(price * _SCALE) for price in prices]
        values = _knapsack(sizes, whole, height + max(sizes))
        need = sum(price * count for price, count in zip(whole, counts, strict=True))
        if need > num_bins * values[height]:
            while height < len(values) and need > num_bins * values[height]:
                height += 1
            return height, pivot
        if values[height] <= _SCALE:
            return height, pivot
        program.enter(_best_pattern(sizes, whole, values, height), 1)
    return height, _MAX_PIVOTS


class _Program:
    """Minimise the number of bins over patterns: a basis of as many patterns as kinds, and its exact inverse."""

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], height: int) -> None:
        kinds = range(len(sizes))
        each = [height // size for size in sizes]
        self._inverse = [[Fraction(1, each[r]) if r == c else Fraction(0) for c in kinds] for r in kinds]
        self._amounts = [Fraction(count, each[r]) for r, count in enumerate(counts)]
        self._costs = [1] * len(sizes)

    def prices(self) -> list[Fraction]:
        """Price of each size: what one more of it would cost in bins."""
        rows = [row for row, cost in zip(self._inverse, self._costs, strict=True) if cost]
        return [sum((row[t] for row in rows), Fraction(0)) for t in range(len(self._costs))]

    def enter(self, pattern: Sequence[int], cost: int) -> None:
        """Take a pattern into the basis, in place of the one that is used up first."""
        column = [sum((v * p for v, p in zip(row, pattern, strict=True) if p), Fraction(0)) for row in self._inverse]
        out = min(
            (r for r, d in enumerate(column) if d > 0), key=lambda r: (self._amounts[r] / column[r], r), default=None
        )
        if out is None:
            return
        pivot = column[out]
        self._inverse[out] = [v / pivot for v in self._inverse[out]]
        self._amounts[out] /= pivot
        for r, d in enumerate(column):
            if r != out and d:
                self._inverse[r] = [v - d * w for v, w in zip(self._inverse[r], self._inverse[out], strict=True)]
                self._amounts[r] -= d * self._amounts[out]
        self._costs[out] = cost


def _knapsack(sizes: Sequence[int], prices: Sequence[int], height: int) -> list[int]:
    """Greatest worth of a bin of every height up to ``height``."""
    values = [0] * (height + 1)
    for size, price in zip(sizes, prices, strict=True):
        for at in range(size, height + 1):
            worth = values[at - size] + price
            if worth > values[at]:
                values[at] = worth
    for at in range(1, height + 1):
        values[at] = max(values[at], values[at - 1])
    return values


def _best_pattern(sizes: Sequence[int], prices: Sequence[int], values: Sequence[int], height: int) -> list[int]:
    pattern = [0] * len(sizes)
    left = height
    while values[left]:
        while left and values[left - 1] == values[left]:
            left -= 1
        for t, (size, price) in enumerate(zip(sizes, prices, strict=True)):
            if size <= left and price and values[left - size] + price == values[left]:
                pattern[t] += 1
                left -= size
                break
    return pattern
