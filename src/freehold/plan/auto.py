"""``bucket_numel="auto"``: the size of bucket with which a step is shortest, according to the timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from freehold.errors import PlanError
from freehold.plan.layout import Layout
from freehold.plan.machine import Machine, Workload
from freehold.plan.planner import plan
from freehold.plan.problem import Policy
from freehold.plan.spec import ParamSpec
from freehold.plan.timeline import Timeline, simulate

__all__ = ["Candidate", "bucket_numel_ladder", "choose_bucket_numel", "fastest", "try_bucket_numels"]

_LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Parts of the model that are tried: a geometric ladder of about the square root of two."""

_TIE = 1e-9
"""Steps whose seconds differ relatively by less are equally long: that is rounding, not a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A ``bucket_numel`` that was tried.

    Attributes:
        bucket_numel: The size that was asked for.
        layout: What the planner made of it.
        timeline: One step with that layout.
    """

    bucket_numel: int
    layout: Layout
    timeline: Timeline


def bucket_numel_ladder(real_numel: int) -> tuple[int, ...]:
    """The sizes that are worth trying: the model in 1 to 64 parts, largest first.

    Example:
        >>> bucket_numel_ladder(96)[:5]
        (96, 48, 32, 24, 16)
    """
    return tuple(dict.fromkeys(max(1, -(-real_numel // parts)) for parts in _LADDER))


def try_bucket_numels(
    params: Iterable[ParamSpec],
    *,
    num_ranks: int,
    policy: str | Policy,
    machine: Machine,
    workload: Workload,
) -> Iterator[Candidate]:
    """Plan and simulate each size of the ladder, one at a time, so that a caller can show progress or a table.

    Args:
        params: The params in model order.
        num_ranks: Ranks of the data-parallel group.
        policy: As for ``plan``.
        machine: Rates and latency.
        workload: Tokens, and what they pass.

    Example:
        >>> params = [ParamSpec(name=f"layers.{i}", shape=(1024, 1024)) for i in range(64)]
        >>> machine = Machine(link_bytes_per_s=25e9, matmul_flops_per_s=400e12)
        >>> tried = list(try_bucket_numels(
        ...     params, num_ranks=4, policy="absorb", machine=machine, workload=Workload(tokens_per_rank=8192)))
        >>> [len(candidate.layout.buckets) for candidate in tried[:4]]
        [1, 2, 3, 4]
    """
    specs = tuple(params)
    for bucket_numel in bucket_numel_ladder(sum(spec.numel for spec in specs if spec.tied_to is None)):
        layout = plan(specs, num_ranks=num_ranks, bucket_numel=bucket_numel, policy=policy)
        timeline = simulate(layout, machine=machine, workload=workload)
        yield Candidate(bucket_numel=bucket_numel, layout=layout, timeline=timeline)


def fastest(candidates: Iterable[Candidate]) -> Candidate:
    """The candidate with the shortest step; among equals the one with the fewest buckets, then the least memory.

    Raises:
        PlanError: There are no candidates.
    """
    tried = list(candidates)
    if not tried:
        raise PlanError("candidates is empty: there is nothing to choose from")
    best_s = min(candidate.timeline.step_s for candidate in tried)
    equals = [candidate for candidate in tried if candidate.timeline.step_s <= best_s * (1 + _TIE)]
    return min(equals, key=lambda c: (len(c.layout.buckets), c.layout.numel, -c.bucket_numel))


def choose_bucket_numel(
    params: Iterable[ParamSpec],
    *,
    num_ranks: int,
    policy: str | Policy,
    machine: Machine,
    workload: Workload,
) -> int:
    """The ``bucket_numel`` with which a step is shortest: few buckets cannot overlap, many pay latency.

    Args:
        params: The params in model order.
        num_ranks: Ranks of the data-parallel group.
        policy: As for ``plan``.
        machine: Rates and latency.
        workload: Tokens, and what they pass.

    Example:
        >>> params = [ParamSpec(name=f"layers.{i}", shape=(1024, 1024)) for i in range(64)]
        >>> slow_start = Machine(link_bytes_per_s=1e15, link_latency_s=1.0, matmul_flops_per_s=1e15)
        >>> choose_bucket_numel(
        ...     params, num_ranks=4, policy="absorb", machine=slow_start, workload=Workload(tokens_per_rank=1))
        67108864
    """
    tried = try_bucket_numels(params, num_ranks=num_ranks, policy=policy, machine=machine, workload=workload)
    return fastest(tried).bucket_numel
