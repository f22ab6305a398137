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
first, and then fills up (the MBS' heuristic of Fleszar and Hindi, 2002): less full bins, but nothing awkward remains."""

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
    """Filled bins and what was left over."""

    rows: tuple[Row, ...]
    left: Counts


class Filler:
    """Fills bins with kinds of given weights; remembers bit sets, and counts its work in steps of about a microsecond."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = tuple(weights)
        self._sums: dict[tuple[int, Counts], list[int]] = {}
        self._words = 0
        self.work = 0

    def sums(self, counts: Counts, capacity: int) -> list[int]:
        """Bit sets of the sums up to ``capacity``: entry i of those reachable with the kinds from i on."""
        useful = tuple([c if c * w <= capacity else capacity // w for c, w in zip(counts, self._weights, strict=True)])
        key = (capacity, useful)
        found = self._sums.get(key)
        if found is None:
            found = self._compute_sums(useful, capacity)
            words = len(useful) * (1 + capacity // 64)
            self.work += words // 32 + len(useful)
            self._words += words
            if self._words > _CACHE_WORDS:
                self._sums.clear()
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
                take = min(step, left)
                bits |= (bits << (weight * take)) & mask
                left -= take
                step *= 2
            result.append(bits)
        result.reverse()
        return result

    def choose(self, counts: Counts, room: int, mode: int, shares: Sequence[int]) -> Counts:
        """One choice of params that weighs as much as possible up to ``room``."""
        return self._choose(self.sums(counts, room), counts, mode, shares)

    def _choose(self, sums: Sequence[int], counts: Counts, mode: int, shares: Sequence[int]) -> Counts:
        room = sums[0].bit_length() - 1
        chosen: list[int] = []
        for i, weight in enumerate(self._weights):
            most = min(counts[i], room // weight)
            take = 0
            if most:
                below = sums[i + 1]
                for take in _tries(most, mode, shares[i]):
                    if below >> (room - take * weight) & 1:
                        break
                room -= take * weight
            chosen.append(take)
        return tuple(chosen)

    def fill(self, counts: Counts, num_bins: int, capacity: int, mode: int) -> Bins:
        """Fill up to ``num_bins`` bins of ``capacity`` units, each as full as possible; empty bins are not listed."""
        left = list(counts)
        rows: list[Row] = []
        while num_bins and any(left):
            pattern = self._one_bin(left, num_bins, capacity, mode)
            if not any(pattern):
                break
            repeats = min([num_bins, *(left[i] // p for i, p in enumerate(pattern) if p)])
            if mode == PROPORTIONAL:
                repeats = min(repeats, -(-num_bins // 2))
            for i, p in enumerate(pattern):
                if p:
                    left[i] -= p * repeats
            rows.append(Row(pattern=pattern, num_bins=repeats))
            num_bins -= repeats
        return Bins(rows=tuple(rows), left=tuple(left))


    def _one_bin(self, left: list[int], num_bins: int, capacity: int, mode: int) -> Counts:
        counts = list(left)
        largest = -1
        if mode == LARGEST_IN:
            largest = next((i for i, c in enumerate(left) if c and self._weights[i] <= capacity), -1)
            if largest >= 0:
                counts[largest] -= 1
                capacity -= self._weights[largest]
        half = num_bins // 2
        sums = self.sums(tuple(counts), capacity)
        pattern = self._choose(sums, tuple(counts), mode, [(c + half) // num_bins for c in counts])
        self.work += len(counts) * (1 + capacity // 4096)
        if largest >= 0:
            return tuple([p + (i == largest) for i, p in enumerate(pattern)])
        return pattern


def _tries(most: int, mode: int, share: int) -> Sequence[int] | Iterator[int]:
    if mode in (BIG_FIRST, LARGEST_IN):
        return range(most, -1, -1)
    if mode == SMALL_FIRST:
        return range(most + 1)
    return _outward(min(share, most), most)


def _outward(centre: int, most: int) -> Iterator[int]:
    yield centre
    for distance in range(1, most + 1):
        if centre + distance <= most:
            yield centre + distance
        if centre >= distance:
            yield centre - distance
