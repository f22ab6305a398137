"""Where the block of stacks in a bucket goes: shifted, mirrored, in another order, so that loads even out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from freehold.plan.policies._packed.recipe import Pocket, Recipe, Run, lay_runs
from freehold.plan.policies._packed.stock import Stock

__all__ = ["PlacedPocket", "SnakePlace", "granules_by_rank", "place_runs"]

_MAX_SHIFTS = 24
"""Positions of the block that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPocket:
    """A pocket at its rank: what is to fill it, from which offset, and how much room there is."""

    rank: int
    offset: int
    numel: int
    pattern: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnakePlace:
    """The block of stacks in its final place.

    Attributes:
        runs: Kind and address of every stack.
        pockets: Room beside them.
        free_ranks: Ranks that the block does not touch.
    """

    runs: tuple[Run, ...]
    pockets: tuple[PlacedPocket, ...]
    free_ranks: tuple[int, ...]


def granules_by_rank(address: int, granule: int, count: int, height: int) -> Iterator[tuple[int, int]]:
    """Ranks that a run touches, and how many of its granules each holds.

    Example:
        >>> list(granules_by_rank(6, 2, 4, 8))
        [(0, 1), (1, 3)]
    """
    stop = address + granule * count
    while address < stop:
        edge = min(stop, address + height - address % height)
        yield address // height, (edge - address) // granule
        address = edge


def place_runs(stock: Stock, recipe: Recipe, loads: Sequence[int]) -> SnakePlace:
    """Choose the variant of the block and the shift by which it adds least to the sum of squared loads."""
    best: SnakePlace | None = None
    best_key: tuple[int, int] | None = None
    for runs, pockets in _variants(stock, recipe):
        added = _added_loads(stock, recipe, runs, pockets)
        for shift in _shifts(stock.num_ranks - recipe.num_run_shards):
            after = [loads[r + shift] + added[r] for r in range(recipe.num_run_shards)]
            key = (sum(2 * loads[r + shift] * a + a * a for r, a in enumerate(added)), max(after))
            if best_key is None or key < best_key:
                best_key, best = key, _shifted(stock, recipe, runs, pockets, shift)
    assert best is not None  # there is always the recipe itself, not shifted
    return best


def _shifts(free: int) -> Iterable[int]:
    if free < _MAX_SHIFTS:
        return range(free + 1)
    return sorted({i * free // (_MAX_SHIFTS - 1) for i in range(_MAX_SHIFTS)})


def _variants(stock: Stock, recipe: Recipe) -> Iterator[tuple[tuple[Run, ...], tuple[Pocket, ...]]]:
    height = recipe.shard_numel
    orders: list[tuple[tuple[Run, ...], tuple[Pocket, ...]]] = [(recipe.runs, recipe.pockets)]
    kinds = [run.kind for run in recipe.runs]
    if len(set(kinds)) > 1 and _is_seamless(stock, recipe):
        gaps = lay_runs(stock, kinds, height)
        for order in (kinds[::-1], _interleaved(kinds)):
            laid = lay_runs(stock, order, height)
            if laid is not None and gaps is not None and laid[1:] == gaps[1:]:
                orders.append((tuple(laid[0]), recipe.pockets))
    end = recipe.num_run_shards * height
    for runs, pockets in orders:
        yield runs, pockets
        mirrored = [Run(kind=r.kind, address=end - r.address - _numel(stock, r.kind)) for r in reversed(runs)]
        if all(run.address % stock.alignment == 0 for run in mirrored):
            flipped = [Pocket(address=end - p.address - p.numel, numel=p.numel, pattern=p.pattern) for p in pockets]
            yield tuple(mirrored), tuple(flipped)


def _numel(stock: Stock, kind: int) -> int:
    return stock.kinds[kind].granule * stock.kinds[kind].num_granules


def _is_seamless(stock: Stock, recipe: Recipe) -> bool:
    """Whether the stacks follow each other without gaps at a height that suits all, so that their order is free."""
    address = 0
    for run in recipe.runs:
        if run.address != address or recipe.shard_numel % stock.kinds[run.kind].granule:
            return False
        address += _numel(stock, run.kind)
        if address % stock.alignment:
            return False
    return True


def _interleaved(kinds: Sequence[int]) -> list[int]:
    """The same kinds, each spread evenly over the whole."""
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    spread = [((2 * i + 1) * len(kinds) // (2 * count), kind) for kind, count in counts.items() for i in range(count)]
    return [kind for _, kind in sorted(spread)]


def _added_loads(stock: Stock, recipe: Recipe, runs: Sequence[Run], pockets: Sequence[Pocket]) -> list[int]:
    added = [0] * recipe.num_run_shards
    for run in runs:
        kind = stock.kinds[run.kind]
        cost = stock.mean_costs[run.kind] // kind.num_granules
        for rank, granules in granules_by_rank(run.address, kind.granule, kind.num_granules, recipe.shard_numel):
            added[rank] += granules * cost
    for pocket in pockets:
        worth = sum(n * c for n, c in zip(pocket.pattern, stock.mean_costs, strict=True))
        added[pocket.address // recipe.shard_numel] += worth
    return added


def _shifted(stock: Stock, recipe: Recipe, runs: Sequence[Run], pockets: Sequence[Pocket], shift: int) -> SnakePlace:
    height = recipe.shard_numel
    taken = range(shift, shift + recipe.num_run_shards)
    return SnakePlace(
        runs=tuple(Run(kind=run.kind, address=run.address + shift * height) for run in runs),
        pockets=tuple(
            PlacedPocket(rank=p.address // height + shift, offset=p.address % height, numel=p.numel, pattern=p.pattern)
            for p in pockets
        ),
        free_ranks=tuple(rank for rank in range(stock.num_ranks) if rank not in taken),
    )
