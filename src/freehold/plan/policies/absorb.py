"""``absorb``: Megatron-LM's PR 5415, in which the bucket size became a soft minimum."""

from __future__ import annotations

from freehold.plan.policies._greedy import absorb_runs, pack_runs_by_size
from freehold.plan.problem import PackedBucket, Problem

__all__ = ["absorb_policy"]


def absorb_policy(problem: Problem) -> tuple[PackedBucket, ...]:
    """As ``threshold``, but a full bucket takes what fits into its padding, by a greedy estimate.

    The estimate places params in backward order, the packing by size: they can disagree, and the bucket grow.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> params = [ParamSpec(name=f"w{i}", shape=(64, 64)) for i in range(4)]
        >>> layout = plan(params, num_ranks=2, bucket_numel=3 * 4096, policy="absorb")
        >>> [bucket.real_numel // 4096 for bucket in layout.buckets]
        [4]
    """
    return pack_runs_by_size(problem, absorb_runs)
