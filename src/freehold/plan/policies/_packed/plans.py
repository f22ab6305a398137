"""Complete plans by kinds: which of them are legal, and the best ones found so far."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.plan.policies._packed.recipe import Recipe
from freehold.plan.policies._packed.stock import Stock

__all__ = ["KindPlan", "Plans", "Recipes"]

Recipes = tuple[Recipe, ...]

_MOST_PLANS = 400
"""Plans kept for the choice by exposure and makespan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """Buckets by kinds, and when each is ready.

    Attributes:
        recipes: The buckets in the order in which they took their params, oldest first.
        height: Sum of their shard sizes.
        ready: For each bucket the backward position of its latest param.
    """

    recipes: Recipes
    height: int
    ready: tuple[int, ...]


class Plans:
    """Legal plans, best first, as long as they are within ``slack`` of the best."""

    def __init__(self, stock: Stock, *, slack: int) -> None:
        self._stock = stock
        self._slack = slack
        self._found: dict[tuple[tuple[tuple[int, ...], int], ...], KindPlan] = {}
        # Far above any plan of use: as if every param had a row of shards to itself.
        self.best = self.cutoff = 1 + sum(kind.size * len(kind.queue) for kind in stock.kinds) + stock.shard_unit

    @property
    def found(self) -> bool:
        """Whether there is any legal plan."""
        return bool(self._found)

    def add(self, recipes: Recipes, height: int) -> None:
        """Note a plan, if it is legal and good enough."""
        key = tuple([(recipe.taken, recipe.shard_numel) for recipe in recipes])
        if height > self.cutoff or key in self._found:
            return
        ready = ready_positions(self._stock, recipes)
        if not self._is_legal(recipes, ready):
            return
        self._found[key] = KindPlan(recipes=recipes, height=height, ready=ready)
        if height < self.best:
            self.best = height
            self.cutoff = min(self.cutoff, height + self._slack)
        if len(self._found) > _MOST_PLANS:
            kept = sorted(self._found.items(), key=lambda entry: entry[1].height)[: _MOST_PLANS // 2]
            self._found = dict(kept)

    def ranked(self) -> list[KindPlan]:
        """The plans within the slack, least height first; equal ones in the order in which they were found."""
        return sorted((p for p in self._found.values() if p.height <= self.cutoff), key=lambda plan: plan.height)

    def _is_legal(self, recipes: Recipes, ready: tuple[int, ...]) -> bool:
        """Only the bucket that is ready last may be smaller than the minimum."""
        small = [
            r
            for recipe, r in zip(recipes, ready, strict=True)
            if self._stock.least_numel_of(recipe.taken) < self._stock.least_bucket_numel
        ]
        return not small or (len(small) == 1 and small[0] == max(ready))


def ready_positions(stock: Stock, recipes: Recipes) -> tuple[int, ...]:
    """Backward position of the latest param of each bucket, each kind being used up oldest first."""
    used = [0] * len(stock.kinds)
    ready: list[int] = []
    for recipe in recipes:
        latest = 0
        for i, taken in enumerate(recipe.taken):
            if taken:
                used[i] += taken
                latest = max(latest, stock.kinds[i].queue[used[i] - 1])
        ready.append(latest)
    return tuple(ready)
