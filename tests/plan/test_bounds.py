"""Bounds hold (against brute force and CP-SAT), are tight where that is known, and name their cause."""

from __future__ import annotations

import random
from itertools import product

import pytest

from freehold.plan import Item, ParamSpec, Problem
from freehold.plan.bounds import buffer_bound, makespan_bound
from freehold.plan.exposure import ReadyBucket, exposed_numel
from freehold.plan.pattern_bound import pattern_bound
from packing_oracle import is_packable, least_height
from planner_cases import fused_zoo, model_zoo, problem_of, specs_of_shapes


def blocks(
    sizes: list[int], num_ranks: int, *, costs: list[int] | None = None, isolated: tuple[int, ...] = ()
) -> Problem:
    """One-granule params of so many units of 4096 elements."""
    items = tuple(
        Item(
            index=i,
            numel=4096 * size,
            granule_numel=4096 * size,
            cost=costs[i] if costs else size,
            isolated=i in isolated,
            shape=(size * 64, 64),
        )
        for i, size in enumerate(sizes)
    )
    return Problem(items=items, num_ranks=num_ranks, bucket_numel=None, alignment=64, shard_unit=64)


def brute_force_least_peak(values: list[int], num_ranks: int) -> int:
    best = sum(values)
    for owners in product(range(num_ranks), repeat=len(values)):
        loads = [0] * num_ranks
        for owner, value in zip(owners, values, strict=True):
            loads[owner] += value
        best = min(best, max(loads))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_bounds_are_never_above_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 3)
    sizes = [rng.choice([rng.randint(1, 30), rng.randint(10, 14)]) for _ in range(rng.randint(1, 8))]
    optimum = brute_force_least_peak(sizes, num_ranks)
    bound = buffer_bound(blocks(sizes, num_ranks))
    assert bound.numel <= num_ranks * optimum * 4096
    assert bound.numel >= num_ranks * max(max(sizes), -(-sum(sizes) // num_ranks)) * 4096
    assert makespan_bound(blocks(sizes, num_ranks)).cost <= optimum


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "reason", "height"),
    [
        ([1] * 8, 4, "total", 2),
        ([2, 1] * 232, 128, "unit", 6),
        ([9, 1, 1], 4, "largest", 9),
        ([7, 6, 5, 1], 2, "pigeonhole", 11),
        ([5, 5, 5, 4], 3, "pigeonhole", 9),
        ([28] * 80 + [14] * 80 + [5] * 80 + [4] * 80, 64, "pattern", 65),
    ],
)
def test_the_active_bound_is_named(sizes: list[int], num_ranks: int, reason: str, height: int) -> None:
    bound = buffer_bound(blocks(sizes, num_ranks))
    assert (bound.active.reason, bound.active.value) == (reason, 4096 * height)
    assert bound.numel == num_ranks * height * 4096
    assert bound.terms[0] == bound.active
    assert all(term.value <= bound.active.value for term in bound.terms)


@pytest.mark.parametrize(
    ("model", "num_ranks", "percent", "reason"),
    [
        ("llama-3-8b", 128, 115.38, "largest"),
        ("llama-3-70b", 32, 0.39, "unit"),
        ("llama-3-70b", 64, 1.96, "pattern"),
        ("llama-3-70b", 128, 3.53, "floor"),
        ("deepseek-v3-experts-ep64-grouped", 128, 10.34, "unit"),
        ("deepseek-v3-attention", 16, 0.012, "pattern"),
        ("deepseek-v3-attention", 32, 0.086, "pattern"),
        ("deepseek-v3-attention", 64, 1.059, "pattern"),
    ],
)
def test_bounds_that_cp_sat_proved_to_be_optima(model: str, num_ranks: int, percent: float, reason: str) -> None:
    bound = buffer_bound(problem_of(fused_zoo()[model], num_ranks, None))
    assert 100 * bound.padding_numel / bound.real_numel == pytest.approx(percent, abs=0.005)
    assert bound.active.reason == reason


def test_llama_70b_unfused_on_256_ranks() -> None:
    bound = buffer_bound(problem_of(model_zoo()["llama-3-70b"], 256, None))
    assert 100 * bound.padding_numel / bound.real_numel == pytest.approx(12.94, abs=0.005)


def test_the_cause_is_a_param_and_the_advice_says_what_helps() -> None:
    bound = buffer_bound(problem_of(fused_zoo()["llama-3-8b"], 128, None))
    assert bound.active.item is not None
    assert bound.active.item.shape == (28672, 4096)
    text = bound.explain()
    assert "115.4%" in text
    assert "(28672, 4096)" in text
    assert "at most 59" in text  # 32 layers x 218,103,808 elements fill 59.4 shards of the largest matrix
    assert "split that param" in text


@pytest.mark.parametrize("sizes", [[2, 1] * 232, [5, 5, 5, 1], [28, 14, 5, 4] * 80, [9, 1, 1], [1] * 9])
@pytest.mark.parametrize("num_ranks", [3, 64, 128])
def test_every_explanation_is_a_sentence(sizes: list[int], num_ranks: int) -> None:
    bound = buffer_bound(blocks(sizes, num_ranks))
    assert bound.explain().endswith(".")
    assert ("At least" in bound.explain()) == (bound.padding_numel > 0)


def test_isolated_params_cost_their_own_bucket_exactly() -> None:
    bound = buffer_bound(blocks([4, 1, 1, 1, 1], 4, isolated=(0,)))
    assert bound.isolated_numel == 4 * 4 * 4096
    assert bound.numel == (4 * 4 + 4 * 1) * 4096
    alone = buffer_bound(blocks([4], 4, isolated=(0,)))
    assert (alone.numel, alone.active.reason) == (16 * 4096, "isolated")


def test_granules_of_a_stack_count_one_by_one() -> None:
    whole = buffer_bound(problem_of(specs_of_shapes([(512, 128)]), 8, None))
    stack = buffer_bound(problem_of(specs_of_shapes([(8, 64, 128)]), 8, None))
    assert stack.padding_numel == 0
    assert whole.numel == 8 * stack.numel


def test_odd_granules_are_not_rounded_up_one_by_one() -> None:
    # Two granules of 65 elements lie next to each other in 130, which takes 192: not two times 128.
    params = [ParamSpec(name="s", shape=(2, 5, 13))]
    assert buffer_bound(problem_of(params, 1, None)).active.value == 256  # a shard on one rank is a multiple of 128


def test_exact_past_2_to_the_63() -> None:
    bound = buffer_bound(blocks([2**60] * 5, 2))
    assert bound.numel == 2 * 3 * 2**60 * 4096


@pytest.mark.parametrize(
    ("costs", "num_ranks", "reason", "cost"),
    [([4, 4, 4, 4], 2, "total", 8), ([9, 1, 1], 3, "largest", 9), ([5, 4, 3], 2, "pigeonhole", 7)],
)
def test_makespan_bound_names_its_reason(costs: list[int], num_ranks: int, reason: str, cost: int) -> None:
    bound = makespan_bound(blocks([1] * len(costs), num_ranks, costs=costs))
    assert (bound.active.reason, bound.cost) == (reason, cost)


def test_isolated_params_all_fall_on_rank_0() -> None:
    bound = makespan_bound(blocks([1] * 4, 4, costs=[3, 3, 1, 1], isolated=(0, 1)))
    assert (bound.active.reason, bound.cost) == ("isolated", 6)


def test_makespan_of_a_stack_counts_granules() -> None:
    problem = problem_of(specs_of_shapes([(8, 64, 128)]), 8, None)
    assert makespan_bound(problem).cost == 128 * 64**2


@pytest.mark.parametrize("seed", range(25))
def test_pattern_bound_against_an_integer_program(seed: int) -> None:
    rng = random.Random(seed)
    sizes = tuple(sorted(rng.sample(range(3, 30), rng.randint(2, 4)), reverse=True))
    counts = tuple(rng.randint(3, 20) for _ in sizes)
    num_bins = rng.randint(2, 12)
    total = sum(size * count for size, count in zip(sizes, counts, strict=True))
    low = max(sizes[0], -(-total // num_bins))
    bound = pattern_bound(sizes, counts, num_bins, low)
    assert low <= bound
    if bound > low:
        assert is_packable(sizes, counts, num_bins, bound - 1) is False
    optimum = least_height(sizes, counts, num_bins, low=low, high=low + sizes[0], step=1)
    assert optimum is None or bound <= optimum


def test_pattern_bound_gives_up_on_large_tables() -> None:
    assert pattern_bound((10**7, 10**7 - 1), (5, 5), 2, 5 * 10**7) == 5 * 10**7


def bucket(ready: int, numel: int) -> ReadyBucket:
    return ReadyBucket(ready_numel=ready, numel=numel)


def test_exposure_of_one_channel() -> None:
    # Backward takes 2 a element. The first bucket is sent from 100 to 150, the second waits for nothing: 200 to 260.
    assert exposed_numel([bucket(50, 50), bucket(100, 60)], 100) == 60
    # A large early bucket delays the last one: 20 to 320, then 320 to 330, where backward ended at 200.
    assert exposed_numel([bucket(100, 10), bucket(10, 300)], 100) == 130
    # Everything is sent before backward ends.
    assert exposed_numel([bucket(10, 20)], 100) == 0
