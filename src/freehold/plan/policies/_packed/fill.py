"""Fill bins one after the other, each as full as the remaining counts allow: an exact subset sum per bin.

A Python int serves as the set of reachable sums: bit s is set if some choice of params weighs s. With few kinds that is
a handful of shifts for a bin, and equal bins are filled together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from freehold.plan.policies._packed.stock import Counts

__all__ = ["BIG_FIRST", "LARGEST_IN", "MODES", "PROPORTIONAL", "SMALL_FIRST", "Bins", "Filler", "Row"]

BIG_FIRST, SMALL_FIRST, PROPORTIONAL, LARGEST_IN = 0, 1, 2, 3
"""Which of the choices that fill a bin equally well is taken: the most of the largest kinds, the fewest of them, or as
many of each kind as its share of the remaining bins. ``LARGEST_IN`` puts the largest param that is left into every bin
first, and then fills up (the MBS' heuristic, Fleszar and Hindi, Computers & Operations Research 29, 2002): the bins are
less full, but nothing awkward remains."""

MODES = (LARGEST_IN, BIG_FIRST, PROPORTIONAL, SMALL_FIRST)

_CACHE_WORDS = 1 << 22
"""Bit sets are remembered up to about this many 64-bit words in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bins with equal contents: how many params of each kind are in one of them, and how many such bins."""

    pattern: Counts
    num_bins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Filled bins, what was left over, and how full the fullest one is."""

    rows: tuple[Row, ...]
    left: Counts
    top: int


class Filler:
    """Fills bins with kinds of given weights; remembers bit sets, and counts its work in small equal steps."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = tuple(weights)
        self._sums: dict[tuple[int, Counts], list[int]] = {}
        self._patterns: dict[tuple[int, int, Counts, Counts], tuple[Counts, int]] = {}
        self._words = 0
        self.work = 0

    def sums(self, counts: Counts, capacity: int) -> list[int]:
        """Bit sets of the sums up to ``capacity``: entry i of those reachable with the kinds from i on."""
        useful = tuple([c if c * w <= capacity else capacity // w for c, w in zip(counts, self._weights, strict=True)])
        return self._useful_sums(useful, capacity)

    def _useful_sums(self, useful: Counts, capacity: int) -> list[int]:
        key = (capacity, useful)
        found = self._sums.get(key)
        if found is None:
            found = self._compute_sums(useful, capacity)
            words = len(useful) * (1 + capacity // 64)
            self.work += words // 16 + 3 * len(useful)
            self._words += words
            if self._words > _CACHE_WORDS:
                self._sums.clear()
                self._patterns.clear()
                self._words = words
            self._sums[key] = found
        return found

    def _compute_sums(self, counts: Counts, capacity: int) -> list[int]:
        mask = (1 << (capacity + 1)) - 1
        bits = 1
        result = [1]
        for left, weight in zip(reversed(counts), reversed(self._weights), strict=True):
            step = 1
            while left:
                take = step if step < left else left
                bits |= (bits << (weight * take)) & mask
                left -= take
                step *= 2
            result.append(bits)
        result.reverse()
        return result

    def choose(self, counts: Counts, room: int, mode: int, shares: Counts) -> Counts:
        """One choice of params that weighs as much as possible up to ``room``."""
        self.work += len(counts)
        useful = tuple([min(c, room // w) for c, w in zip(counts, self._weights, strict=True)])
        return self._choose(useful, room, mode, shares)[0]

    def _choose(self, useful: Counts, capacity: int, mode: int, shares: Counts) -> tuple[Counts, int]:
        """A choice and its weight. ``useful`` counts are at most what fits alone."""
        sums = self._useful_sums(useful, capacity)
        top = room = sums[0].bit_length() - 1
        self.work += len(useful) * (2 + capacity // 4096)
        chosen = [0] * len(useful)
        for i, weight in enumerate(self._weights):
            if not room:
                break
            most = room // weight
            if most > useful[i]:
                most = useful[i]
            if not most:
                continue
            below = sums[i + 1]
            if mode in (BIG_FIRST, LARGEST_IN):
                while not below >> (room - most * weight) & 1:
                    most -= 1
                take = most
            else:
                tries = range(most + 1) if mode == SMALL_FIRST else _outward(min(shares[i], most), most)
                take = next(take for take in tries if below >> (room - take * weight) & 1)
            chosen[i] = take
            room -= take * weight
        return tuple(chosen), top

    def fill(self, counts: Counts, num_bins: int, capacity: int, mode: int) -> Bins:
        """Fill up to ``num_bins`` bins of ``capacity`` units, each as full as possible; empty bins are not listed."""
        left: list[int] = list(counts)
        limits = [capacity // weight for weight in self._weights]
        nothing = (0,) * len(left)
        rows: list[Row] = []
        highest = 0
        self.work += len(left) // 2
        while num_bins:
            shares = nothing
            if mode == PROPORTIONAL:
                half = num_bins // 2
                shares = tuple([min((c + half) // num_bins, limit) for c, limit in zip(left, limits, strict=True)])
            pattern, top = self._one_bin(tuple(map(min, left, limits)), capacity, mode, shares)
            if not top:
                break
            self.work += len(left)
            repeats: int = min([num_bins, *[left[i] // p for i, p in enumerate(pattern) if p]])
            if mode == PROPORTIONAL:
                repeats = min(repeats, -(-num_bins // 2))
            left = [c - p * repeats for c, p in zip(left, pattern, strict=True)]
            highest = max(highest, top)
            num_bins -= repeats
            if rows and rows[-1].pattern == pattern:
                repeats += rows.pop().num_bins
            rows.append(Row(pattern=pattern, num_bins=repeats))
        return Bins(rows=tuple(rows), left=tuple(left), top=highest)

    def _one_bin(self, useful: Counts, capacity: int, mode: int, shares: Counts) -> tuple[Counts, int]:
        key = (capacity, mode, useful, shares)
        found = self._patterns.get(key)
        if found is None:
            found = self._patterns[key] = self._fresh_bin(useful, capacity, mode, shares)
        return found

    def _fresh_bin(self, useful: Counts, capacity: int, mode: int, shares: Counts) -> tuple[Counts, int]:
        largest = -1
        if mode == LARGEST_IN:
            largest = next((i for i, count in enumerate(useful) if count), -1)
        if largest < 0:
            return self._choose(useful, capacity, mode, shares)
        room = capacity - self._weights[largest]
        counts = list(useful)
        counts[largest] -= 1
        rest = tuple([min(c, room // w) for c, w in zip(counts, self._weights, strict=True)])
        pattern, top = self._choose(rest, room, mode, shares)
        return tuple([p + (i == largest) for i, p in enumerate(pattern)]), top + self._weights[largest]


def _outward(centre: int, most: int) -> Iterator[int]:
    yield centre
    for distance in range(1, most + 1):
        if centre + distance <= most:
            yield centre + distance
        if centre >= distance:
            yield centre - distance
