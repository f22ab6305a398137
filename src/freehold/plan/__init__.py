"""Planning as pure functions of integers: params in, a layout out. Imports the standard library only."""

from __future__ import annotations

import sys
from inspect import signature
from types import ModuleType

from freehold.plan.auto import choose_bucket_numel
from freehold.plan.bounds import BoundTerm, BufferBound, MakespanBound, buffer_bound, makespan_bound
from freehold.plan.bucket import Bucket, Mode, Slot
from freehold.plan.cost import (
    Costs,
    flop_costs,
    granule_cost,
    max_min_squared,
    newton_schulz_flops,
    param_cost,
    rank_costs,
)
from freehold.plan.layout import Layout, Padding
from freehold.plan.machine import Machine, Workload
from freehold.plan.planner import default_bucket_numel, plan
from freehold.plan.policies import policy_names, resolve_policy
from freehold.plan.policies.packed import PackedPolicy
from freehold.plan.problem import Item, PackedBucket, Placement, Policy, Problem
from freehold.plan.spec import ParamSpec, RuleKind
from freehold.plan.timeline import Timeline, simulate

__all__ = [
    "BoundTerm",
    "Bucket",
    "BufferBound",
    "Costs",
    "Item",
    "Layout",
    "Machine",
    "MakespanBound",
    "Mode",
    "PackedBucket",
    "PackedPolicy",
    "Padding",
    "ParamSpec",
    "Placement",
    "Policy",
    "Problem",
    "RuleKind",
    "Slot",
    "Timeline",
    "Workload",
    "buffer_bound",
    "choose_bucket_numel",
    "default_bucket_numel",
    "flop_costs",
    "granule_cost",
    "makespan_bound",
    "max_min_squared",
    "newton_schulz_flops",
    "param_cost",
    "plan",
    "policy_names",
    "rank_costs",
    "resolve_policy",
    "simulate",
]


class _CallableModule(ModuleType):
    # ``freehold.plan(...)`` is the planner, and ``freehold.plan`` is also this subpackage. Were the function
    # bound to that name instead, the subpackage would take it back at the first ``import
    # freehold.plan.layout``: the import system sets submodules as attributes of their package. So the
    # subpackage itself can be called.
    __call__ = staticmethod(plan)
    __signature__ = signature(plan)  # or inspect takes the first parameter for ``self``


sys.modules[__name__].__class__ = _CallableModule
