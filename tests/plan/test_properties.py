"""What holds for every policy and every problem."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.plan import (
    Bucket,
    Item,
    Layout,
    PackedBucket,
    ParamSpec,
    Placement,
    Problem,
    param_cost,
    plan,
    policy_names,
    rank_costs,
)
from freehold.plan.policies._greedy import absorb_runs, isolated_bucket
from freehold.plan.problem import align_up, shard_unit
from strategies import Case, cases, whole_cases

EVERY_POLICY = pytest.mark.parametrize("policy", policy_names())


def spans(layout: Layout) -> list[tuple[int, int, str, int, int]]:
    """(first address, last address + 1, name, start, stop) of every slot, by address."""
    return sorted(
        (address, address + slot.numel, slot.name, slot.start, slot.stop)
        for bucket in layout.buckets
        for slot in bucket.slots
        for address in [bucket.start + slot.rank * bucket.shard_numel + slot.offset]
    )


@EVERY_POLICY
@settings(max_examples=60)
@given(case=cases())
def test_every_layout_is_sound(policy: str, case: Case) -> None:
    layout = case.plan(policy)
    assert layout.problems() == []
    assert Layout.from_json(layout.to_json()) == layout


@EVERY_POLICY
@settings(max_examples=40)
@given(case=cases(max_params=25))
def test_every_element_has_one_address_and_params_are_contiguous(policy: str, case: Case) -> None:
    """Said again without ``problems()``: an oracle for it on sound layouts."""
    layout = case.plan(policy)
    found = spans(layout)
    assert all(left[1] <= right[0] for left, right in pairwise(found))
    where: dict[str, tuple[int, int]] = {}
    for first, last, name, start, stop in found:
        address, done = where.get(name, (first, 0))
        assert (address + start, done) == (first, start)
        assert last - first == stop - start
        where[name] = (address, stop)
    expected = {spec.name: spec.numel for spec in case.params if spec.tied_to is None}
    assert {name: stop for name, (_, stop) in where.items()} == expected


@EVERY_POLICY
@settings(max_examples=30)
@given(case=cases())
def test_elements_costs_and_padding_are_conserved(policy: str, case: Case) -> None:
    layout = case.plan(policy)
    untied = [spec for spec in case.params if spec.tied_to is None]
    assert layout.real_numel == sum(spec.numel for spec in untied)
    assert layout.real_numel == sum(bucket.real_numel for bucket in layout.buckets)
    assert layout.numel == layout.buckets[-1].stop == layout.real_numel + layout.padding_numel
    padding = layout.padding_by_cause
    assert padding.alignment >= 0
    assert padding.imbalance >= 0
    assert padding.alignment + padding.imbalance == layout.padding_numel
    assert sum(rank_costs(layout)) == sum(param_cost(spec) for spec in untied if spec.mode == "whole")


@EVERY_POLICY
@settings(max_examples=20)
@given(case=cases(max_params=30))
def test_equal_problems_have_equal_layouts(policy: str, case: Case) -> None:
    again = replace(case, params=tuple(replace(spec) for spec in case.params))
    assert again.plan(policy).fingerprint() == case.plan(policy).fingerprint()


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    num_ranks=st.integers(1, 33),
    bucket_numel=st.one_of(st.none(), st.integers(1, 20_000)),
    isolated=st.sets(st.integers(0, 39), max_size=3),
)
def test_flat_buckets_pad_for_alignment_only(
    sizes: list[int], num_ranks: int, bucket_numel: int | None, isolated: set[int]
) -> None:
    params = [
        ParamSpec(name=f"p{index}", shape=(numel,), rule="elementwise", isolated=index in isolated)
        for index, numel in enumerate(sizes)
    ]
    layout = plan(params, num_ranks=num_ranks, bucket_numel=bucket_numel)
    assert layout.problems() == []
    assert layout.padding_by_cause.imbalance == 0
    unit = shard_unit(num_ranks, 64, high_busbw=False)
    for bucket in layout.buckets:
        names = {slot.name for slot in bucket.slots}
        assert bucket.numel - bucket.real_numel < 64 * len(names) + num_ranks * unit
        # All shards before the last used one are full but for the gaps in front of their params.
        last = max(slot.rank for slot in bucket.slots)
        for rank in range(last):
            assert bucket.shard_numel - filled(bucket, rank) < 64


def filled(bucket: Bucket, rank: int) -> int:
    """Elements of a shard up to the end of its last slot, given that the gaps before are for alignment."""
    end = 0
    for slot in bucket.slots_of_rank(rank):
        assert slot.offset == align_up(end, 64)
        end = slot.offset + slot.numel
    return end


@settings(max_examples=150)
@given(case=whole_cases(max_params=40))
def test_ns_cost_equals_the_plain_scan_that_it_replaces(case: Case) -> None:
    """The segment tree answers as a loop over all ranks would, ties included."""
    assert case.plan("ns_cost").buckets == case.plan(scan).buckets


def scan(problem: Problem) -> tuple[PackedBucket, ...]:
    costs = [0] * problem.num_ranks
    packed: list[PackedBucket] = []
    for run in absorb_runs(problem):
        packed.append(isolated_bucket(problem, run[0]) if run[0].isolated else _scan_run(problem, run, costs))
    return tuple(packed)


def _scan_run(problem: Problem, run: list[Item], costs: list[int]) -> PackedBucket:
    ends = [0] * problem.num_ranks
    total = sum(item.numel for item in run)
    placements: list[Placement] = []
    for item in sorted(run, key=lambda item: -item.cost):
        starts = [align_up(end, problem.alignment) for end in ends]
        ranks = range(problem.num_ranks)
        room = [rank for rank in ranks if starts[rank] + item.numel <= total / problem.num_ranks * (1 + 0.3)]
        rank = min(room, key=lambda rank: costs[rank]) if room else min(ranks, key=lambda rank: ends[rank])
        placements.append(Placement(index=item.index, rank=rank, offset=starts[rank]))
        ends[rank] = starts[rank] + item.numel
        costs[rank] += item.cost
    return PackedBucket(placements=tuple(placements), shard_numel=align_up(max(ends), problem.shard_unit))
