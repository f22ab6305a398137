"""``plan``: what it accepts, what it refuses and how it says so, and which buckets it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from freehold.errors import LayoutError, PlanError, PlanTypeError
from freehold.plan import (
    Layout,
    PackedBucket,
    ParamSpec,
    Placement,
    Policy,
    Problem,
    default_bucket_numel,
    plan,
    policy_names,
    resolve_policy,
)
from freehold.plan.problem import shard_unit

W = ParamSpec(name="w", shape=(8, 8))
V = ParamSpec(name="v", shape=(8, 8))

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a set": ({"params": {W, V}}, PlanTypeError, "in model order.*got a set"),
    "a dict": ({"params": {"w": W}}, PlanTypeError, "in model order.*got a dict"),
    "dict keys": ({"params": {W: 1}.keys()}, PlanTypeError, "in model order.*got a dict_keys"),
    "a string": ({"params": "w"}, PlanTypeError, "in model order.*got a str"),
    "one spec": ({"params": W}, PlanTypeError, "in model order.*got a ParamSpec"),
    "no specs": ({"params": [W, (8, 8)]}, PlanTypeError, r"params\[1\] must be a ParamSpec, got \(8, 8\)"),
    "empty": ({"params": []}, PlanError, "params is empty"),
    "twice": ({"params": [W, V, W, V, W]}, PlanError, "'w' is given 3 times\nparam 'v' is given 2 times"),
    "tied to nobody": (
        {"params": [W, replace(V, tied_to="x")]},
        PlanError,
        "'v' is tied to 'x', which is not among",
    ),
    "tied to a tied one": (
        {"params": [W, replace(V, tied_to="w"), replace(W, name="u", tied_to="v")]},
        PlanError,
        "'u' is tied to 'v', which is tied to 'w' itself",
    ),
    "tied to itself": (
        {"params": [V, replace(W, tied_to="w")]},
        PlanError,
        "'w', which is tied to 'w' itself",
    ),
    "tied to another shape": (
        {"params": [W, ParamSpec(name="v", shape=(4, 16), tied_to="w")]},
        PlanError,
        r"'v' of bfloat16 \(4, 16\) is tied to 'w' of bfloat16 \(8, 8\)",
    ),
    "tied to another dtype": (
        {"params": [W, replace(V, dtype="float32", tied_to="w")]},
        PlanError,
        r"'v' of float32 \(8, 8\) is tied to 'w' of bfloat16 \(8, 8\)",
    ),
    "no ranks": ({"num_ranks": 0}, PlanError, "num_ranks must be at least 1, got 0"),
    "bool as ranks": ({"num_ranks": True}, PlanTypeError, "num_ranks must be an int, got True"),
    "float as ranks": ({"num_ranks": 2.0}, PlanTypeError, "num_ranks must be an int, got 2.0"),
    "zero": ({"bucket_numel": 0}, PlanError, "bucket_numel must be at least 1, got 0; None makes one bucket"),
    "negative": ({"bucket_numel": -1}, PlanError, "bucket_numel must be at least 1, got -1"),
    "bool": (
        {"bucket_numel": True},
        PlanTypeError,
        "bucket_numel must be an int, None or 'default', got True",
    ),
    "float": (
        {"bucket_numel": 1.5},
        PlanTypeError,
        "bucket_numel must be an int, None or 'default', got 1.5",
    ),
    "unknown word": ({"bucket_numel": "small"}, PlanError, "None or 'default', got 'small'"),
    "alignment 0": ({"alignment": 0}, PlanError, "alignment must be a power of two, got 0"),
    "alignment 48": ({"alignment": 48}, PlanError, "alignment must be a power of two, got 48"),
    "alignment 64.0": ({"alignment": 64.0}, PlanTypeError, "alignment must be an int, got 64.0"),
    "high_busbw 1": ({"high_busbw": 1}, PlanTypeError, "high_busbw must be a bool, got 1"),
    "unknown policy": (
        {"policy": "best"},
        PlanError,
        "threshold, absorb, ns_cost.* or a callable; got 'best'",
    ),
    "no policy": ({"policy": None}, PlanTypeError, "or a callable; got None"),
    "all at once": (
        {"num_ranks": 0, "bucket_numel": -1, "alignment": 3},
        PlanError,
        "num_ranks must be .*\nbucket_numel must be .*\nalignment must be ",
    ),
    "types first, values too": (
        {"num_ranks": 0, "bucket_numel": 1.5},
        PlanTypeError,
        "bucket_numel must be .*\nnum_ranks must be ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_argument_is_refused_with_its_name_and_value(case: str) -> None:
    changes, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        plan(**{"params": [W, V], "num_ranks": 2, **changes})


def test_a_tie_may_point_forward() -> None:
    layout = plan([replace(V, tied_to="w"), W], num_ranks=2)
    assert layout.owner("v") == layout.owner("w") == 0
    assert layout.real_numel == 64


def test_any_iterable_in_model_order_will_do() -> None:
    expected = plan([W, V], num_ranks=2)
    assert plan((W, V), num_ranks=2) == expected
    assert plan(iter([W, V]), num_ranks=2) == expected
    assert plan({"a": W, "b": V}.values(), num_ranks=2) == expected
    assert plan([V, W], num_ranks=2) != expected


def test_a_policy_may_be_given_as_a_callable() -> None:
    by_name = plan([W, V], num_ranks=2, policy="absorb")
    assert plan([W, V], num_ranks=2, policy=resolve_policy("absorb")) == by_name
    mine = plan([W, V], num_ranks=2, policy=lambda problem: resolve_policy("absorb")(problem))
    assert (mine.policy, mine.buckets) == ("<lambda>", by_name.buckets)


def bucket(*placements: tuple[int, int, int], shard_numel: int = 64) -> PackedBucket:
    return PackedBucket(
        placements=tuple(Placement(index=i, rank=rank, offset=offset) for i, rank, offset in placements),
        shard_numel=shard_numel,
    )


BROKEN: dict[str, tuple[Callable[[Problem], tuple[PackedBucket, ...]], str]] = {
    "forgets one": (lambda _: (bucket((0, 0, 0)),), r"every item once; .*\{1: 0\}"),
    "places one twice": (lambda _: (bucket((0, 0, 0), (1, 1, 0)), bucket((1, 0, 0))), r"\{1: 2\}"),
    "invents one": (lambda _: (bucket((0, 0, 0), (2, 1, 0)),), "placed item 2 of 2"),
    "rank": (lambda _: (bucket((0, 0, 0), (1, 2, 0)),), "placed item 1 outside its bucket"),
    "negative rank": (lambda _: (bucket((0, 0, 0), (1, -1, 0)),), "placed item 1 outside its bucket"),
    "negative offset": (lambda _: (bucket((0, 0, 0), (1, 1, -64)),), "placed item 1 outside its bucket"),
    "beyond the end": (lambda _: (bucket((0, 0, 0), (1, 1, 32)),), "placed item 1 outside its bucket"),
    "empty bucket": (lambda _: (bucket((0, 0, 0), (1, 1, 0)), bucket()), "a bucket without params"),
    "odd shard": (
        lambda _: (bucket((0, 0, 0), (1, 1, 0), shard_numel=65),),
        "65 elements, no multiple of 64",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_policy_is_named(case: str) -> None:
    decide, message = BROKEN[case]

    def mine(problem: Problem) -> tuple[PackedBucket, ...]:
        return decide(problem)

    with pytest.raises(LayoutError, match=f"policy 'mine'.*{message}"):
        plan([W, V], num_ranks=2, policy=mine)


def test_buckets_of_each_mode_and_dtype_stand_in_the_order_in_which_they_become_ready() -> None:
    params = [
        ParamSpec(name="a", shape=(8, 8), dtype="float32"),
        ParamSpec(name="b", shape=(64,), rule="elementwise"),
        ParamSpec(name="c", shape=(8, 8)),
        ParamSpec(name="d", shape=(64,), rule="elementwise"),
        ParamSpec(name="e", shape=(8, 8), dtype="float32"),
        ParamSpec(name="f", shape=(8, 8)),
    ]
    layout = plan(params, num_ranks=1, bucket_numel=1, policy="threshold")
    found = [(b.mode, b.dtype, *(slot.name for slot in b.slots)) for b in layout.buckets]
    assert found == [
        ("whole", "bfloat16", "f"),
        ("whole", "float32", "e"),
        ("flat", "bfloat16", "d"),
        ("whole", "bfloat16", "c"),
        ("flat", "bfloat16", "b"),
        ("whole", "float32", "a"),
    ]
    one_each = plan(params, num_ranks=1)
    assert [(b.mode, b.dtype) for b in one_each.buckets] == [
        ("whole", "bfloat16"),
        ("flat", "bfloat16"),
        ("whole", "float32"),
    ]
    assert layout.problems() == one_each.problems() == []


@pytest.mark.parametrize("alignment", [1, 16, 128, 1024])
def test_other_alignments(alignment: int) -> None:
    params = [ParamSpec(name=f"w{i}", shape=(5, 2 * i + 1)) for i in range(9)]
    params += [ParamSpec(name=f"n{i}", shape=(3 * i + 1,), rule="elementwise") for i in range(9)]
    layout = plan(params, num_ranks=3, alignment=alignment)
    assert layout.problems() == []
    assert any(slot.offset for b in layout.buckets for slot in b.slots)
    assert all(slot.offset % alignment == 0 for b in layout.buckets for slot in b.slots)


def test_flat_params_are_cut_at_shard_edges() -> None:
    params = [
        ParamSpec(name="late", shape=(100,), rule="elementwise"),
        ParamSpec(name="early", shape=(150,), rule="elementwise"),
    ]
    (only,) = plan(params, num_ranks=4).buckets
    # early fills 0 to 150, late 192 to 292: a quarter of 292 is 73, hence shards of 128
    assert only.shard_numel == 128
    found = [(slot.name, slot.rank, slot.offset, slot.start, slot.stop) for slot in only.slots]
    assert found == [
        ("early", 0, 0, 0, 128),
        ("early", 1, 0, 128, 150),
        ("late", 1, 64, 0, 64),
        ("late", 2, 0, 64, 100),
    ]


@pytest.mark.parametrize(("bucket_numel", "sizes"), [(100, [100, 130, 70]), (101, [230, 70]), (231, [300])])
def test_flat_buckets_close_as_soon_as_they_hold_bucket_numel(bucket_numel: int, sizes: list[int]) -> None:
    params = [ParamSpec(name=f"n{numel}", shape=(numel,), rule="elementwise") for numel in (70, 130, 100)]
    layout = plan(params, num_ranks=2, bucket_numel=bucket_numel)
    assert [b.real_numel for b in layout.buckets] == sizes


@pytest.mark.parametrize(
    ("real_numel", "num_ranks", "expected"),
    [
        (10**12, 1, 40_000_000),
        (10**12, 40, 40_000_000),
        (10**12, 41, 41_000_000),
        (80_000_000, 64, 10_000_000),
        (7, 8, 1),
    ],
)
def test_default_bucket_numel(real_numel: int, num_ranks: int, expected: int) -> None:
    assert default_bucket_numel(real_numel, num_ranks) == expected


def test_default_is_resolved_in_the_layout_and_ignores_tied_params() -> None:
    params = [
        W,
        V,
        replace(V, name="tied", tied_to="v"),
        ParamSpec(name="n", shape=(32,), rule="elementwise"),
    ]
    assert plan(params, num_ranks=2, bucket_numel="default").bucket_numel == (64 + 64 + 32) // 8


def test_the_registry_names_the_policies() -> None:
    assert {"threshold", "absorb", "ns_cost"} <= set(policy_names())


@pytest.mark.parametrize("policy", policy_names())
def test_b33_offsets_past_two_to_the_31_are_exact(policy: str) -> None:
    giant = ParamSpec(name="giant", shape=(46341, 46341))
    params = [giant] + [ParamSpec(name=f"w{i}", shape=(8192, 8192)) for i in range(100)]
    layout = plan(params, num_ranks=8, policy=policy)
    assert giant.numel == 2_147_488_281
    assert layout.problems() == []
    starts: list[int] = []
    for b in layout.buckets:
        for slot in b.slots:
            starts.append(b.start + slot.rank * b.shard_numel + slot.offset)
            assert all(type(number) is int for number in (slot.offset, slot.start, slot.stop, starts[-1]))
    assert starts == sorted(set(starts))
    assert all(layout.slots_of(spec.name)[-1].stop == spec.numel for spec in params)
    assert sum(slot.numel for slot in layout.slots_of("giant")) == giant.numel
    assert layout.buckets[-1].stop > 2**31 < layout.numel
    assert layout.numel >= layout.real_numel == giant.numel + 100 * 8192**2


B34_PARAMS = [
    *(ParamSpec(name=f"w{i}", shape=(8, 8)) for i in range(5)),
    ParamSpec(name="tall", shape=(100, 3)),
    ParamSpec(name="one", shape=(1, 1)),
]


def b34_plan(bucket_numel: Any, num_ranks: int, policy: str | Policy) -> Layout:
    return plan(B34_PARAMS, num_ranks=num_ranks, bucket_numel=bucket_numel, policy=policy)


@pytest.mark.parametrize(
    ("bucket_numel", "error"),
    [(True, TypeError), (1.5, TypeError), (0, ValueError), (-1, ValueError), (-(10**12), ValueError)],
)
@pytest.mark.parametrize("policy", policy_names())
def test_b34_no_size_is_no_bucket_numel(bucket_numel: Any, error: type[Exception], policy: str) -> None:
    with pytest.raises(error, match="bucket_numel"):
        b34_plan(bucket_numel, 3, policy)


@pytest.mark.parametrize("bucket_numel", [None, 1, 64, 100, 10**12])
@pytest.mark.parametrize("num_ranks", [3, 5, 7])
@pytest.mark.parametrize("policy", policy_names())
def test_b34_bucket_numel_is_a_soft_minimum(bucket_numel: int | None, num_ranks: int, policy: str) -> None:
    layout = b34_plan(bucket_numel, num_ranks, policy)
    assert layout.problems() == []
    for b in layout.buckets[:-1]:
        assert bucket_numel is not None
        assert b.real_numel >= bucket_numel
    for b in layout.buckets:
        tallest = max(slot.offset + slot.numel for slot in b.slots)
        assert b.numel == num_ranks * b.shard_numel
        assert b.numel % num_ranks == 0
        assert 0 <= b.shard_numel - tallest < shard_unit(num_ranks, 64, high_busbw=False)
    if bucket_numel in (None, 10**12):
        assert len(layout.buckets) == 1


@pytest.mark.parametrize("policy", ["threshold", "absorb", "ns_cost"])
def test_b34_ties_are_broken_by_index(policy: str) -> None:
    """Of equal params the first in backward order goes to the lowest rank."""
    params = [ParamSpec(name=f"w{i}", shape=(8, 8)) for i in range(6)]
    layout = plan(params, num_ranks=3, policy=policy)
    assert [layout.owner(f"w{i}") for i in reversed(range(6))] == [0, 1, 2, 0, 1, 2]
    assert [layout.slots_of(f"w{i}")[0].offset for i in reversed(range(6))] == [0, 0, 0, 64, 64, 64]
