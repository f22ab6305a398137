"""Costs: the number that Megatron-LM balances, true flops, and their sums over ranks."""

from __future__ import annotations

import pytest

from freehold.plan import (
    PackedBucket,
    ParamSpec,
    Placement,
    Problem,
    max_min_squared,
    newton_schulz_flops,
    param_cost,
    plan,
    rank_costs,
)


@pytest.mark.parametrize(
    ("rows", "cols", "expected"),
    [(3, 5, 45), (5, 3, 45), (1, 7, 7), (4, 4, 64), (2**20, 2**20, 2**60), (10**9 + 7, 3, 9 * (10**9 + 7))],
)
def test_max_min_squared_is_symmetric_and_exact(rows: int, cols: int, expected: int) -> None:
    assert max_min_squared(rows, cols) == expected


def counted_flops(rows: int, cols: int) -> int:
    """Multiplications and additions of one step, counted product by product."""
    m, n = min(rows, cols), max(rows, cols)
    products = [(m, n, m), (m, m, m), (m, m, n)]  # X X^T, A A, B X
    return sum(2 * a * b * c for a, b, c in products)


@pytest.mark.parametrize(("rows", "cols"), [(3, 5), (5, 3), (64, 64), (4096, 11008)])
def test_newton_schulz_flops_are_those_of_its_three_products(rows: int, cols: int) -> None:
    assert newton_schulz_flops(rows, cols, num_steps=1) == counted_flops(rows, cols)
    assert newton_schulz_flops(rows, cols) == 5 * counted_flops(rows, cols)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ParamSpec(name="matrix", shape=(4, 6)), 96),
        (ParamSpec(name="stack", shape=(5, 4, 6)), 5 * 96),
        (ParamSpec(name="whole stack", shape=(5, 4, 6), granule_numel=120), 120),
        (ParamSpec(name="convolution", shape=(4, 2, 3, 1)), 96),
        (ParamSpec(name="vector", shape=(7,), granule_numel=7), 7),
        (ParamSpec(name="embedding", shape=(10, 4), rule="elementwise"), 40),
        (ParamSpec(name="head", shape=(10, 4), rule="elementwise", granule_numel=40), 40),
    ],
    ids=lambda value: value.name if isinstance(value, ParamSpec) else None,
)
def test_param_cost_counts_matrices_by_work_and_the_rest_by_elements(spec: ParamSpec, expected: int) -> None:
    assert param_cost(spec) == expected


def test_rank_costs_counts_the_matrices_of_each_rank_and_no_flat_bucket() -> None:
    params = [
        ParamSpec(name="big", shape=(8, 16)),
        ParamSpec(name="norm", shape=(500,), rule="elementwise"),
        ParamSpec(name="small", shape=(8, 8)),
    ]
    assert rank_costs(plan(params, num_ranks=3, policy="absorb")) == (1024, 512, 0)


def test_rank_costs_counts_a_stack_over_several_ranks_granule_by_granule() -> None:
    def spread(problem: Problem) -> tuple[PackedBucket, ...]:
        from_start = PackedBucket(placements=(Placement(index=0, rank=0, offset=0),), shard_numel=128)
        assert problem.shard_unit == 64
        return (from_start,)

    layout = plan([ParamSpec(name="experts", shape=(3, 8, 8))], num_ranks=2, policy=spread)
    assert layout.problems() == []
    assert rank_costs(layout) == (2 * 512, 512)
