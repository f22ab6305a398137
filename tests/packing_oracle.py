"""A proved optimum of small packing problems: an integer program over the ways to fill a bin, solved by CP-SAT.

The least sum of shard sizes over all layouts, of any number of buckets, is the least height of one bucket with as many
bins as there are ranks: put the buckets of any layout on top of each other. So the oracle asks for each height in turn
whether the params fit into that many bins, and the first yes is the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator

from ortools.sat.python import cp_model

__all__ = ["is_packable", "least_height"]

MAX_PATTERNS = 20_000


def maximal_patterns(sizes: tuple[int, ...], counts: tuple[int, ...], height: int) -> Iterator[tuple[int, ...]]:
    """Ways to fill a bin to which nothing can be added."""

    def extend(kind: int, room: int, pattern: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if kind == len(sizes):
            if all(room < size or p == c for size, p, c in zip(sizes, pattern, counts, strict=True)):
                yield pattern
            return
        for take in range(min(counts[kind], room // sizes[kind]), -1, -1):
            yield from extend(kind + 1, room - take * sizes[kind], (*pattern, take))

    return extend(0, height, ())


def is_packable(sizes: tuple[int, ...], counts: tuple[int, ...], num_bins: int, height: int) -> bool | None:
    """Whether everything fits into ``num_bins`` bins; ``None`` if there are too many patterns or it took too long."""
    patterns = []
    for pattern in maximal_patterns(sizes, counts, height):
        patterns.append(pattern)
        if len(patterns) > MAX_PATTERNS:
            return None
    model = cp_model.CpModel()
    used = [model.new_int_var(0, num_bins, f"x{i}") for i in range(len(patterns))]
    model.add(sum(used) <= num_bins)
    for kind, count in enumerate(counts):
        model.add(sum(p[kind] * x for p, x in zip(patterns, used, strict=True) if p[kind]) >= count)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 10
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:
        return None
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def least_height(
    sizes: tuple[int, ...], counts: tuple[int, ...], num_bins: int, *, low: int, high: int, step: int
) -> int | None:
    """Least multiple of ``step`` from ``low`` at which all fits; ``high`` is known to do. ``None``: not decided."""
    for height in range(low, high, step):
        answer = is_packable(sizes, counts, num_bins, height)
        if answer is None:
            return None
        if answer:
            return height
    return high
