"""Policies by name. A new one is a file here and a row in the table below."""

from __future__ import annotations

from types import FunctionType

from freehold.errors import PlanError, PlanTypeError
from freehold.plan.policies.absorb import absorb_policy
from freehold.plan.policies.ns_cost import ns_cost_policy
from freehold.plan.policies.packed import PackedPolicy
from freehold.plan.policies.threshold import threshold_policy
from freehold.plan.problem import Policy

__all__ = ["POLICIES", "policy_label", "policy_names", "resolve_policy"]

POLICIES: dict[str, Policy] = {
    "threshold": threshold_policy,
    "absorb": absorb_policy,
    "ns_cost": ns_cost_policy,
    "packed": PackedPolicy(),
}


def policy_names() -> tuple[str, ...]:
    """The names that ``freehold.plan`` takes as ``policy``.

    Example:
        >>> "ns_cost" in policy_names()
        True
    """
    return tuple(POLICIES)


def resolve_policy(policy: str | Policy) -> Policy:
    """The policy of that name, or ``policy`` itself if it is one.

    Example:
        >>> resolve_policy("absorb").__name__
        'absorb_policy'

    Raises:
        PlanError: There is no policy of that name.
        PlanTypeError: It is neither a name nor a callable.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise PlanError(f"policy must be one of {', '.join(POLICIES)}, or a callable; got {policy!r}")
        return POLICIES[policy]
    if not callable(policy):
        raise PlanTypeError(f"policy must be one of {', '.join(POLICIES)}, or a callable; got {policy!r}")
    return policy


def policy_label(policy: str | Policy) -> str:
    """The name under which a layout records its policy: never one that differs from process to process.

    Example:
        >>> policy_label(resolve_policy("absorb"))
        'absorb'
    """
    if isinstance(policy, str):
        return policy
    for name, registered in POLICIES.items():
        if policy == registered:
            return name
    return policy.__name__ if isinstance(policy, FunctionType) else type(policy).__name__
