"""Policies and numbers of ranks side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from freehold.plan.layout import Layout
from freehold.plan.planner import plan
from freehold.plan.spec import ParamSpec
from freehold.report.measure import LayoutReport, measure

__all__ = ["PlannedReport", "compare", "planned"]

BucketNumel = Callable[[int, str], int | str | None]
"""Gives ``bucket_numel`` for a number of ranks and a policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReport:
    """A layout and its figures."""

    layout: Layout
    report: LayoutReport


def planned(
    params: Sequence[ParamSpec], *, num_ranks: int, bucket_numel: int | str | None, policy: str
) -> PlannedReport:
    """Plan, take the time, and measure.

    Args:
        params: The params in model order.
        num_ranks: As for ``plan``.
        bucket_numel: As for ``plan``.
        policy: A name of ``policy_names()``.

    Raises:
        PlanError: The problem cannot be laid out as stated.

    Example:
        >>> params = [ParamSpec(name=f"layers.{i}", shape=(64, 64)) for i in range(4)]
        >>> planned(params, num_ranks=2, bucket_numel=None, policy="absorb").report.padding_numel
        0
    """
    start_s = time.perf_counter()
    layout = plan(params, num_ranks=num_ranks, bucket_numel=bucket_numel, policy=policy)
    plan_s = time.perf_counter() - start_s
    return PlannedReport(layout=layout, report=measure(layout, plan_s=plan_s))


def compare(
    params: Sequence[ParamSpec],
    *,
    rank_counts: Sequence[int],
    policies: Sequence[str],
    bucket_numel: BucketNumel,
) -> Iterator[LayoutReport]:
    """Plan every number of ranks with every policy, one at a time, so that a caller can show progress.

    Args:
        params: The params in model order.
        rank_counts: Numbers of ranks.
        policies: Names of policies.
        bucket_numel: Gives ``bucket_numel`` for each of them.

    Example:
        >>> params = [ParamSpec(name=f"layers.{i}", shape=(64, 64)) for i in range(4)]
        >>> reports = compare(
        ...     params, rank_counts=(2, 8), policies=("absorb",), bucket_numel=lambda num_ranks, policy: None)
        >>> [report.padding_fraction for report in reports]
        [0.0, 1.0]
    """
    for num_ranks in rank_counts:
        for policy in policies:
            size = bucket_numel(num_ranks, policy)
            yield planned(params, num_ranks=num_ranks, bucket_numel=size, policy=policy).report
