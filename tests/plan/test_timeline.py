"""The timeline against closed forms at its limits, against hand-made steps, and its laws on random layouts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.errors import PlanError, PlanTypeError
from freehold.plan import Layout, PackedBucket, ParamSpec, Placement, Problem, newton_schulz_flops, plan
from freehold.plan.auto import Candidate, bucket_numel_ladder, choose_bucket_numel, fastest, try_bucket_numels
from freehold.plan.exposure import BACKWARD_PER_SEND, ReadyBucket, exposed_numel
from freehold.plan.machine import Machine, Workload, ring_s
from freehold.plan.timeline import Timeline, simulate
from strategies import Case, cases

FREE_LINK = Machine(link_bytes_per_s=math.inf, link_latency_s=0, matmul_flops_per_s=1e9)
ONE_TOKEN = Workload(tokens_per_rank=1)


def layers(count: int, size: int = 64, **options: object) -> list[ParamSpec]:
    return [ParamSpec(name=f"layers.{i}.weight", shape=(size, size), **options) for i in range(count)]  # type: ignore[arg-type]


def layout_of(count: int, num_ranks: int, num_buckets: int, size: int = 64) -> Layout:
    """``count`` equal matrices in ``num_buckets`` equal buckets, without padding."""
    layout = plan(
        layers(count, size),
        num_ranks=num_ranks,
        bucket_numel=count * size * size // num_buckets,
        policy="absorb",
    )
    assert len(layout.buckets) == num_buckets
    assert layout.padding_numel == 0
    return layout


def stops(timeline: Timeline, kind: str) -> list[tuple[int | None, float]]:
    return [(event.bucket, event.stop_s) for event in timeline.events if event.kind == kind]


# -- limits against closed forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_buckets", [1, 2, 8])
def test_a_free_link_leaves_compute_alone(num_buckets: int) -> None:
    layout = layout_of(16, 2, num_buckets)
    timeline = simulate(layout, machine=FREE_LINK, workload=Workload(tokens_per_rank=10))
    numel = 16 * 64 * 64
    assert timeline.exposed_comm_s == 0
    assert timeline.comm_s == 0
    assert timeline.backward_s == pytest.approx(4 * numel * 10 / 1e9)
    assert timeline.forward_s == pytest.approx(2 * numel * 10 / 1e9)
    assert timeline.update_s == pytest.approx((8 * newton_schulz_flops(64, 64) / 1e9,) * 2)
    assert timeline.step_s == pytest.approx((6 * numel * 10 + 8 * newton_schulz_flops(64, 64)) / 1e9)


@pytest.mark.parametrize("num_ranks", [2, 5, 16])
def test_one_bucket_exposes_both_collectives_in_full(num_ranks: int) -> None:
    layout = plan(layers(16), num_ranks=num_ranks)
    machine = Machine(link_bytes_per_s=1e6, link_latency_s=0, matmul_flops_per_s=1e9)
    timeline = simulate(layout, machine=machine, workload=ONE_TOKEN)
    share = (num_ranks - 1) / num_ranks / 1e6
    assert timeline.exposed_reduce_s == pytest.approx(layout.numel * 4 * share)  # fp32 gradients
    assert timeline.exposed_gather_s == pytest.approx(layout.numel * 2 * share)  # bf16 weights
    assert timeline.comm_s == pytest.approx(timeline.exposed_comm_s)


def test_infinite_flops_leave_the_link_alone() -> None:
    layout = layout_of(16, 4, 4)
    machine = Machine(link_bytes_per_s=1e6, link_latency_s=1e-3, matmul_flops_per_s=math.inf)
    timeline = simulate(layout, machine=machine, workload=ONE_TOKEN)
    transfer_s = 16 * 64 * 64 * (4 + 2) * (3 / 4) / 1e6
    assert timeline.step_s == pytest.approx(transfer_s + 2 * 4 * 3 * 1e-3)
    assert timeline.step_s == pytest.approx(timeline.exposed_comm_s)
    assert timeline.update_s == (0,) * 4


@pytest.mark.parametrize("num_buckets", [1, 2, 4])
def test_latency_alone_is_paid_for_every_hop_of_every_collective(num_buckets: int) -> None:
    machine = Machine(link_bytes_per_s=math.inf, link_latency_s=0.5, matmul_flops_per_s=1)
    timeline = simulate(layout_of(16, 4, num_buckets, size=32), machine=machine, workload=ONE_TOKEN)
    assert timeline.comm_s == pytest.approx(2 * num_buckets * (4 - 1) * 0.5)


def test_one_rank_communicates_nothing() -> None:
    machine = Machine(link_bytes_per_s=1, link_latency_s=1, matmul_flops_per_s=1e9)
    assert simulate(plan(layers(4), num_ranks=1), machine=machine, workload=ONE_TOKEN).comm_s == 0


@pytest.mark.parametrize(("link_bytes_per_s", "is_fast"), [(1e12, True), (1e5, False)])
def test_equal_buckets_overlap_as_a_pipeline_does(link_bytes_per_s: float, is_fast: bool) -> None:
    """K equal buckets: a fast link exposes the last one, a slow link everything but the first stretch of backward."""
    num_buckets = 8
    layout = layout_of(16, 2, num_buckets)
    machine = Machine(link_bytes_per_s=link_bytes_per_s, link_latency_s=0, matmul_flops_per_s=1e9)
    timeline = simulate(layout, machine=machine, workload=Workload(tokens_per_rank=100))
    send_s = ring_s(layout.numel // num_buckets * 4, 2, machine)
    hidden_s = timeline.backward_s * (num_buckets - 1) / num_buckets
    expected_s = send_s if is_fast else num_buckets * send_s - hidden_s
    assert timeline.exposed_reduce_s == pytest.approx(expected_s)


# -- steps worked out by hand -----------------------------------------------------------------------------------------


def one_each(problem: Problem) -> tuple[PackedBucket, ...]:
    """A bucket for each param, on the ranks in turn."""
    return tuple(
        PackedBucket(placements=(Placement(index=i.index, rank=i.index, offset=0),), shard_numel=i.numel)
        for i in problem.items
    )


def test_a_step_of_two_buckets_by_hand() -> None:
    """Rank 0 owns the first layer (bucket 1), rank 1 the second (bucket 0); 4096 elements each, half of it padding.

    1 flop/s of compute per 4096 element-tokens: backward 4 + 4 s, forward 2 + 2 s. The link moves 8192 elements in 4 s
    at four bytes and in 2 s at two. Newton-Schulz takes 3 s a matrix.
    """
    layout = plan(layers(2), num_ranks=2, policy=one_each)
    assert [(b.slots[0].name, b.slots[0].rank) for b in layout.buckets] == [
        ("layers.1.weight", 0),
        ("layers.0.weight", 1),
    ]
    machine = Machine(
        link_bytes_per_s=4096,
        link_latency_s=0,
        matmul_flops_per_s=4096,
        newton_schulz_flops_per_s=newton_schulz_flops(64, 64) / 3,
    )
    timeline = simulate(layout, machine=machine, workload=ONE_TOKEN)
    # Backward: layer 1 at 4 s, layer 0 at 8 s; bucket 0 leaves at 4 s, bucket 1 at 8 s, and each takes 4 s.
    assert stops(timeline, "reduce") == [(0, 8), (1, 12)]
    # Updates from 12 s, both ranks at once: bucket 1 on rank 1 first, bucket 0 on rank 0 is done at the same time.
    assert stops(timeline, "update") == [(1, 15), (0, 15)]
    assert timeline.update_s == (3, 3)
    assert stops(timeline, "gather") == [(1, 17), (0, 19)]
    # Forward from 15 s waits for bucket 1 until 17 s, computes until 19 s, and finds bucket 0 there.
    assert [(e.start_s, e.stop_s) for e in timeline.events if e.kind == "forward"] == [(17, 21)]
    assert (timeline.backward_s, timeline.forward_s, timeline.comm_s) == (8, 4, 12)
    assert (timeline.exposed_reduce_s, timeline.exposed_gather_s) == (4, 2)
    assert timeline.step_s == 21
    assert timeline.busy_s == (15, 15)


def test_gathers_of_early_buckets_hide_behind_the_update_of_the_others() -> None:
    """On one owner the updates follow one another, and the gather of the first overlaps with the second."""
    params = [*layers(2, isolated=True)]
    layout = plan(params, num_ranks=2)  # isolated params lie on rank 0
    ns_s = 10.0
    machine = Machine(
        link_bytes_per_s=4096,
        link_latency_s=0,
        matmul_flops_per_s=math.inf,
        newton_schulz_flops_per_s=newton_schulz_flops(64, 64) / ns_s,
    )
    timeline = simulate(layout, machine=machine, workload=ONE_TOKEN)
    assert timeline.update_s == (2 * ns_s, 0)
    assert stops(timeline, "update") == [(1, 8 + ns_s), (0, 8 + 2 * ns_s)]
    assert timeline.exposed_gather_s == pytest.approx(2)  # bucket 0 alone
    assert stops(timeline, "gather") == [(1, 8 + ns_s + 2), (0, 8 + 2 * ns_s + 2)]


def test_the_gradient_of_a_tied_weight_is_complete_at_its_first_use() -> None:
    embedding = ParamSpec(name="embedding", shape=(64, 64), rule="elementwise")
    head = ParamSpec(name="head", shape=(64, 64), rule="elementwise", tied_to="embedding")
    machine = Machine(link_bytes_per_s=math.inf, link_latency_s=0, matmul_flops_per_s=4096)
    timeline = simulate(plan([embedding, *layers(1), head], num_ranks=2), machine=machine, workload=ONE_TOKEN)
    # Head 4 s, layer 4 s, and looking up the embedding costs nothing.
    assert timeline.backward_s == 8
    assert stops(timeline, "reduce") == [(0, 8), (1, 8)]


def test_only_a_leading_elementwise_table_is_a_lookup_unless_named() -> None:
    table = ParamSpec(name="table", shape=(64, 64), rule="elementwise")
    head = ParamSpec(name="head", shape=(64, 64), rule="elementwise")
    machine = Machine(link_bytes_per_s=math.inf, link_latency_s=0, matmul_flops_per_s=4096)

    def backward_s(params: list[ParamSpec], **options: frozenset[str]) -> float:
        workload = Workload(tokens_per_rank=1, **options)  # type: ignore[arg-type]
        return simulate(plan(params, num_ranks=2), machine=machine, workload=workload).backward_s

    assert backward_s([table, *layers(1), head]) == 8
    assert backward_s([*layers(1), head]) == 8
    assert backward_s([table, *layers(1), head], lookups=frozenset()) == 12
    assert backward_s([table, *layers(1), head], lookups=frozenset(["table", "head"])) == 4
    with pytest.raises(PlanError, match="'tabel'"):
        backward_s([table], lookups=frozenset(["tabel"]))


@pytest.mark.parametrize(("experts_per_token", "slices"), [(None, 8), (2, 2), (100, 8)])
def test_a_token_passes_only_some_matrices_of_a_stack(experts_per_token: int | None, slices: int) -> None:
    layout = plan([ParamSpec(name="experts", shape=(8, 64, 64))], num_ranks=2)
    workload = Workload(tokens_per_rank=3, experts_per_token=experts_per_token)
    timeline = simulate(layout, machine=FREE_LINK, workload=workload)
    assert timeline.forward_s == pytest.approx(2 * slices * 4096 * 3 / 1e9)
    assert sum(timeline.update_s) == pytest.approx(8 * newton_schulz_flops(64, 64) / 1e9)  # all of them are updated


def test_bytes_follow_the_dtypes() -> None:
    machine = Machine(link_bytes_per_s=1, link_latency_s=0, matmul_flops_per_s=math.inf)

    def comm_s(dtype: str, reduction_dtype: str = "float32") -> float:
        workload = Workload(tokens_per_rank=1, reduction_dtype=reduction_dtype)
        return simulate(plan(layers(2, dtype=dtype), num_ranks=2), machine=machine, workload=workload).comm_s

    half_numel = 4096
    assert comm_s("bfloat16") == half_numel * (4 + 2)
    assert comm_s("bfloat16", "bfloat16") == half_numel * (2 + 2)
    assert comm_s("float32") == half_numel * (4 + 4)
    assert comm_s("float64") == half_numel * (8 + 8)
    with pytest.raises(PlanError, match="'int3'"):
        comm_s("int3")


# -- laws on random layouts -------------------------------------------------------------------------------------------

MACHINES = st.builds(
    Machine,
    link_bytes_per_s=st.floats(1e3, 1e9),
    link_latency_s=st.floats(0, 1e-3),
    matmul_flops_per_s=st.floats(1e6, 1e12),
    newton_schulz_flops_per_s=st.none() | st.floats(1e6, 1e12),
)


@settings(max_examples=60)
@given(cases(max_params=25, max_ranks=9), MACHINES, st.integers(1, 10_000))
def test_laws_of_a_step(case: Case, machine: Machine, tokens_per_rank: int) -> None:
    layout = case.plan("ns_cost")
    timeline = simulate(layout, machine=machine, workload=Workload(tokens_per_rank=tokens_per_rank))
    compute_s = timeline.backward_s + max(timeline.update_s) + timeline.forward_s
    close = 1 + 1e-9
    assert compute_s <= timeline.step_s * close
    assert timeline.comm_s <= timeline.step_s * close
    assert timeline.step_s <= (compute_s + timeline.comm_s) * close
    assert max(event.stop_s for event in timeline.events) == pytest.approx(timeline.step_s)
    on_link = [event for event in timeline.events if event.kind in ("reduce", "gather")]
    assert [event.bucket for event in on_link] == [*range(len(layout.buckets)), *range(len(layout.buckets))[::-1]]
    for before, after in pairwise(on_link):
        assert before.stop_s <= after.start_s
    updated = dict(stops(timeline, "update"))
    assert all(event.start_s >= updated[event.bucket] for event in on_link if event.kind == "gather")


@settings(max_examples=30)
@given(cases(max_params=25, max_ranks=9), MACHINES)
def test_a_better_machine_is_never_slower(case: Case, machine: Machine) -> None:
    layout, workload = case.plan("absorb"), Workload(tokens_per_rank=64)
    before_s = simulate(layout, machine=machine, workload=workload).step_s
    for better in (
        Machine(
            link_bytes_per_s=2 * machine.link_bytes_per_s,
            link_latency_s=machine.link_latency_s / 2,
            matmul_flops_per_s=machine.matmul_flops_per_s,
            newton_schulz_flops_per_s=machine.newton_schulz_flops_per_s,
        ),
        Machine(
            link_bytes_per_s=machine.link_bytes_per_s,
            link_latency_s=machine.link_latency_s,
            matmul_flops_per_s=2 * machine.matmul_flops_per_s,
            newton_schulz_flops_per_s=2 * machine.update_flops_per_s,
        ),
    ):
        assert simulate(layout, machine=better, workload=workload).step_s <= before_s * (1 + 1e-9)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 8), st.integers(2, 9))
def test_the_policies_model_of_exposure_is_this_one(rows: list[int], parts: int, num_ranks: int) -> None:
    """``exposed_numel`` counts in sends of an element, with a link that sends the model in half a backward pass."""
    params = [ParamSpec(name=f"w{i}", shape=(n, 64)) for i, n in enumerate(rows)]
    real_numel = sum(spec.numel for spec in params)
    layout = plan(params, num_ranks=num_ranks, bucket_numel=-(-real_numel // parts), policy="threshold")
    position = {spec.name: i for i, spec in enumerate(reversed(params))}
    ready = []
    for bucket in layout.buckets:
        latest = max(position[slot.name] for slot in bucket.slots)
        ready_numel = sum(spec.numel for spec in params[::-1][: latest + 1])
        ready.append(ReadyBucket(ready_numel=ready_numel, numel=bucket.numel))
    send_s = 1.0
    machine = Machine(
        link_bytes_per_s=4 * (num_ranks - 1) / num_ranks / send_s,
        link_latency_s=0,
        matmul_flops_per_s=4 / BACKWARD_PER_SEND / send_s,
    )
    timeline = simulate(layout, machine=machine, workload=ONE_TOKEN)
    assert timeline.exposed_reduce_s == pytest.approx(exposed_numel(ready, real_numel) * send_s)


# -- bucket_numel="auto" ----------------------------------------------------------------------------------------------


def choose(machine: Machine, tokens_per_rank: int = 1) -> int:
    workload = Workload(tokens_per_rank=tokens_per_rank)
    return choose_bucket_numel(layers(64), num_ranks=4, policy="absorb", machine=machine, workload=workload)


def test_latency_asks_for_one_bucket_and_bandwidth_for_many() -> None:
    total = 64 * 64 * 64
    slow_start = Machine(link_bytes_per_s=math.inf, link_latency_s=1, matmul_flops_per_s=1e12)
    assert choose(slow_start) == total
    # Where all but the last bucket hides, the last one should be small. With 12 matrices a bucket 4 are left for it,
    # which is as little as four ranks can share; smaller buckets are more of them for the same step.
    narrow = Machine(link_bytes_per_s=1e9, link_latency_s=0, matmul_flops_per_s=1e9)
    chosen = choose(narrow, tokens_per_rank=10_000)
    assert chosen == -(-total // 6)
    layout = plan(layers(64), num_ranks=4, bucket_numel=chosen, policy="absorb")
    assert [bucket.numel // 4096 for bucket in layout.buckets] == [12, 12, 12, 12, 12, 4]


def test_equal_steps_go_to_fewer_buckets() -> None:
    assert choose(FREE_LINK) == 64 * 64 * 64


def test_the_choice_is_the_best_of_what_was_tried() -> None:
    machine = Machine(link_bytes_per_s=1e9, link_latency_s=1e-5, matmul_flops_per_s=1e10)
    arguments = {"num_ranks": 4, "policy": "ns_cost", "machine": machine, "workload": Workload(tokens_per_rank=100)}
    tried = list(try_bucket_numels(layers(48), **arguments))  # type: ignore[arg-type]
    assert [candidate.bucket_numel for candidate in tried] == list(bucket_numel_ladder(48 * 4096))
    assert all(candidate.layout.bucket_numel == candidate.bucket_numel for candidate in tried)
    best = fastest(tried)
    assert best.timeline.step_s == min(candidate.timeline.step_s for candidate in tried)
    assert best.bucket_numel == choose_bucket_numel(layers(48), **arguments)  # type: ignore[arg-type]
    assert len({candidate.timeline.step_s for candidate in tried}) > 1
    assert fastest(reversed(tried)) == best


def test_the_ladder_of_a_tiny_model_has_no_rung_twice() -> None:
    assert bucket_numel_ladder(3) == (3, 2, 1)
    with pytest.raises(PlanError, match="candidates is empty"):
        fastest(list[Candidate]())


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"link_bytes_per_s": 0}, PlanError, "link_bytes_per_s must be a rate above 0"),
        ({"link_bytes_per_s": -1.0}, PlanError, "link_bytes_per_s"),
        ({"link_bytes_per_s": math.nan}, PlanError, "link_bytes_per_s"),
        ({"matmul_flops_per_s": True}, PlanTypeError, "matmul_flops_per_s must be a number"),
        ({"newton_schulz_flops_per_s": "fast"}, PlanTypeError, "newton_schulz_flops_per_s"),
        ({"link_latency_s": -1e-6}, PlanError, "link_latency_s"),
        ({"link_latency_s": math.inf}, PlanError, "link_latency_s"),
    ],
)
def test_impossible_machines_are_refused(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Machine(**{"link_bytes_per_s": 1.0, "matmul_flops_per_s": 1.0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens_per_rank": 0}, PlanError, "tokens_per_rank must be at least 1, got 0"),
        ({"tokens_per_rank": 8192.0}, PlanTypeError, "tokens_per_rank must be an int"),
        ({"experts_per_token": 0}, PlanError, "experts_per_token"),
        ({"newton_schulz_steps": -5}, PlanError, "newton_schulz_steps"),
        ({"reduction_dtype": "fp32"}, PlanError, "dtype must be one of bfloat16"),
    ],
)
def test_impossible_workloads_are_refused(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Workload(**{"tokens_per_rank": 1, **options})  # type: ignore[arg-type]
