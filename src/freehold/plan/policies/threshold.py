"""``threshold``: what Megatron-LM did before its PR 5415, the baseline."""

from __future__ import annotations

from freehold.plan.policies._greedy import pack_runs_by_size, threshold_runs
from freehold.plan.problem import PackedBucket, Problem

__all__ = ["threshold_policy"]


def threshold_policy(problem: Problem) -> tuple[PackedBucket, ...]:
    """Close a bucket at ``max(bucket_numel, int(0.9 x num_ranks x its largest param))``; pack by size.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> params = [ParamSpec(name=f"w{i}", shape=(64, 64)) for i in range(5)]
        >>> layout = plan(params, num_ranks=2, bucket_numel=8192, policy="threshold")
        >>> [bucket.real_numel // 4096 for bucket in layout.buckets]
        [2, 2, 1]
    """
    return pack_runs_by_size(problem, threshold_runs)
