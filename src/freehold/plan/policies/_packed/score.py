"""One number for a result: padding, makespan and exposed communication, each as a part of what cannot be avoided."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from freehold.plan.exposure import ReadyBucket, exposed_numel, waiting_numel
from freehold.plan.policies._packed.plans import KindPlan
from freehold.plan.policies._packed.recipe import Recipe
from freehold.plan.policies._packed.snake import granules_by_rank
from freehold.plan.policies._packed.stock import Stock
from freehold.plan.problem import PackedBucket, Problem

__all__ = ["Scale", "estimate", "exposed_of_plan", "loads_of", "measure"]

_PARTS = 1_000_000
"""Scores are whole numbers of millionths."""


class Scale:
    """What padding, cost and exposure are measured against."""

    def __init__(self, problem: Problem, cost_bound: int, exposed_weight: float) -> None:
        self.cost_bound = cost_bound
        self.exposed_weight = exposed_weight.as_integer_ratio()
        self.heads = list(accumulate((item.numel for item in problem.items), initial=0))

    @property
    def real_numel(self) -> int:
        """Elements of all params."""
        return self.heads[-1]

    def total(self, padded_numel: int, exposed: int) -> int:
        """Padding and exposure, in millionths of the model."""
        numerator, denominator = self.exposed_weight
        weighted = exposed * numerator // denominator
        return (padded_numel + weighted) * _PARTS // self.real_numel


def exposed_of_plan(problem: Problem, stock: Stock, plan: KindPlan, scale: Scale) -> tuple[int, int, int]:
    """Score of a plan by kinds before it is dealt: padding and exposure; then the step; then the number of buckets."""
    ready = [
        ReadyBucket(ready_numel=scale.heads[at + 1], numel=recipe.shard_numel * stock.num_ranks)
        for at, recipe in zip(plan.ready, plan.recipes, strict=True)
    ]
    exposed = exposed_numel(ready, scale.real_numel)
    score = scale.total(plan.height * problem.num_ranks, exposed)
    return score, waiting_numel(ready, scale.real_numel), len(ready)


def estimate(problem: Problem, stock: Stock, plan: KindPlan, scale: Scale) -> int:
    """Score of a plan by kinds, with the makespan that dealing and then giving params away will about reach."""
    costs = stock.mean_costs
    plenty = max(range(len(costs)), key=lambda i: (not stock.kinds[i].is_stack, costs[i] * len(stock.kinds[i].queue)))
    loads = [0] * stock.num_ranks
    places = 0
    for recipe in plan.recipes:
        loads.sort()
        dealt = _bin_costs(recipe, costs)
        rest = sum(n * c for n, c in zip(recipe.taken, costs, strict=True)) - sum(dealt)
        # Stacks fill shards evenly, and their block is put where load is least; what is left goes to the other ranks.
        for rank in range(recipe.num_run_shards):
            loads[rank] += rest // recipe.num_run_shards
        for rank, cost in enumerate(dealt, start=recipe.num_run_shards):
            loads[rank] += cost
        places += _places(stock, recipe, stock.kinds[plenty].size)
    makespan = max(_lowered(loads, places * costs[plenty]), scale.cost_bound)
    return exposed_of_plan(problem, stock, plan, scale)[0] + makespan * _PARTS // max(1, scale.cost_bound)


def _bin_costs(recipe: Recipe, costs: Sequence[int]) -> list[int]:
    """Cost of every bin that is a whole shard, dearest first."""
    worth = [(sum(n * c for n, c in zip(row.pattern, costs, strict=True)), row.num_bins) for row in recipe.rows]
    return sorted((cost for cost, num_bins in worth for _ in range(num_bins)), reverse=True)


def _places(stock: Stock, recipe: Recipe, size: int) -> int:
    """How many more params of that size the bins of a bucket have room for."""
    empty = stock.num_ranks - recipe.num_run_shards - sum(row.num_bins for row in recipe.rows)
    rows = ((recipe.shard_numel - stock.size_of(row.pattern), row.num_bins) for row in recipe.rows)
    return empty * (recipe.shard_numel // size) + sum(room // size * num_bins for room, num_bins in rows)


def _lowered(loads: list[int], movable: int) -> int:
    """The peak after ``movable`` cost was taken off the dearest ranks."""
    ranked = sorted(loads, reverse=True)
    taken = 0
    for i, load in enumerate(ranked[1:], start=1):
        step = (ranked[i - 1] - load) * i
        if taken + step > movable:
            return ranked[i - 1] - (movable - taken) // i
        taken += step
    return ranked[-1]


def measure(problem: Problem, buckets: Sequence[PackedBucket], scale: Scale) -> tuple[int, int, int]:
    """Score of a finished result: less is better. Ties go to the shorter step, then to fewer buckets."""
    ready = [
        ReadyBucket(
            ready_numel=scale.heads[max(p.index for p in bucket.placements) + 1],
            numel=bucket.shard_numel * problem.num_ranks,
        )
        for bucket in buckets
    ]
    padded = sum(bucket.numel for bucket in ready)
    score = scale.total(padded, exposed_numel(ready, scale.real_numel))
    makespan = max(loads_of(problem, buckets)) * _PARTS // max(1, scale.cost_bound)
    return score + makespan, waiting_numel(ready, scale.real_numel), len(ready)


def loads_of(problem: Problem, buckets: Sequence[PackedBucket]) -> list[int]:
    """Cost of every rank."""
    loads = [0] * problem.num_ranks
    for bucket in buckets:
        for placement in bucket.placements:
            item = problem.items[placement.index]
            count = item.numel // item.granule_numel
            if count == 1:
                loads[placement.rank] += item.cost
                continue
            address = placement.rank * bucket.shard_numel + placement.offset
            for rank, granules in granules_by_rank(address, item.granule_numel, count, bucket.shard_numel):
                loads[rank] += granules * (item.cost // count)
    return loads
