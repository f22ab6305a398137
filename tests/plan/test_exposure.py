"""What tells equal layouts apart, against the timeline that it stands for."""

from __future__ import annotations

import math

import pytest

from freehold.plan import Layout, Machine, ParamSpec, Workload, flop_costs, plan, rank_costs, simulate
from freehold.plan.exposure import ReadyBucket, exposed_numel, waiting_numel
from planner_cases import model_zoo


def ready_buckets(layout: Layout) -> list[ReadyBucket]:
    heads: dict[str, int] = {}
    total = 0
    for spec in reversed(layout.params):
        total += spec.numel
        heads[spec.name] = total
    return [ReadyBucket(ready_numel=max(heads[s.name] for s in b.slots), numel=b.numel) for b in layout.buckets]


def waited_s(layout: Layout, speed: float) -> float:
    """Waiting in the timeline without latency or Newton-Schulz, in eighths of the time to send an element."""
    send_bytes = 4 * (layout.num_ranks - 1) / layout.num_ranks
    machine = Machine(
        link_bytes_per_s=send_bytes / 8,
        link_latency_s=0,
        matmul_flops_per_s=4 / (2 * speed),
        newton_schulz_flops_per_s=math.inf,
    )
    return simulate(layout, machine=machine, workload=Workload(tokens_per_rank=1)).exposed_comm_s


@pytest.mark.parametrize("policy", ["threshold", "absorb", "ns_cost", "packed"])
@pytest.mark.parametrize(("model", "num_ranks"), [("llama-3-8b", 16), ("qwen3-1.7b", 32), ("mixtral-8x7b", 64)])
def test_waiting_is_that_of_the_timeline(model: str, num_ranks: int, policy: str) -> None:
    layout = plan(model_zoo()[model], num_ranks=num_ranks, bucket_numel="default", policy=policy)
    expected = sum(waited_s(layout, speed) for speed in (1, 2, 4, 8))
    found = waiting_numel(ready_buckets(layout), layout.real_numel)
    assert expected > 0
    assert found == pytest.approx(expected, rel=1e-9)


def test_nothing_is_waited_for_where_the_link_is_idle_at_the_end() -> None:
    buckets = [ReadyBucket(ready_numel=10, numel=10), ReadyBucket(ready_numel=100, numel=0)]
    assert exposed_numel(buckets, 100) == 0
    assert waiting_numel([ReadyBucket(ready_numel=100, numel=0)], 100) == 0


@pytest.mark.parametrize("num_ranks", [16, 32, 64, 128])
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-1.7b", "qwen3-32b"])
def test_packed_waits_no_longer_than_a_policy_that_is_as_good_in_all_else(model: str, num_ranks: int) -> None:
    params: list[ParamSpec] = model_zoo()[model]
    costs = flop_costs(params)
    ours = plan(params, num_ranks=num_ranks, bucket_numel="default", costs=costs)
    for policy in ("threshold", "absorb", "ns_cost"):
        other = plan(params, num_ranks=num_ranks, bucket_numel="default", policy=policy, costs=costs)
        mine, others = (
            (
                layout.numel,
                max(rank_costs(layout, costs)),
                exposed_numel(ready_buckets(layout), layout.real_numel),
            )
            for layout in (ours, other)
        )
        if all(b <= a for a, b in zip(mine, others, strict=True)):
            assert sum(waited_s(ours, s) for s in (1, 2, 4, 8)) <= sum(waited_s(other, s) for s in (1, 2, 4, 8))
