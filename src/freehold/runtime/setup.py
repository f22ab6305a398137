"""From a model to params under management: everything before the first collective, and the building after it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from freehold.errors import LifecycleError, PlanError, PlanTypeError, RoutingError
from freehold.plan import Bucket, Costs, Layout, ParamSpec, Policy, Slot, plan
from freehold.rules import Rule
from freehold.runtime.agreement import agree
from freehold.runtime.buffers import BucketBuffers, allocate_weights, reduction_dtype
from freehold.runtime.comm import Comm, control_comm
from freehold.runtime.consensus import options_text
from freehold.runtime.faults import check_timeout
from freehold.runtime.gradients import GradientBuffer, GradMemory
from freehold.runtime.live_options import LiveOptions
from freehold.runtime.params import ManagedParam
from freehold.runtime.pool import TensorPool
from freehold.runtime.registry import refuse_claimed
from freehold.runtime.routing import Group, NamedParam, Route, check_tensors, named_params_of, route
from freehold.runtime.update import allocate_state

__all__ = ["Blueprint", "Options", "agreed_blueprint", "build", "draw_up", "resolve_group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The constructor's arguments, but for the params and the group of ranks."""

    rules: Mapping[str, Rule]
    groups: Sequence[Group]
    bucket_numel: int | str | None
    policy: str | Policy
    reduce_dtype: torch.dtype
    on_nonfinite: str
    overlap: bool
    grad_memory: GradMemory = "full"
    early_update: bool = False
    costs: Costs | None = None
    timeout_s: float | None = None
    verify_every: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What one rank decided alone, to be compared with the others before anything is built.

    Attributes:
        module: The model, if it was given.
        routes: The trainable params and their rules, in model order.
        frozen: Params that are not managed.
        param_groups: Options and Parameters, as ``torch.optim.Optimizer`` wants them.
        group_of: Index of each route's param group.
        layout: The plan.
    """

    module: nn.Module | None
    routes: tuple[Route, ...]
    frozen: tuple[NamedParam, ...]
    param_groups: list[dict[str, Any]]
    group_of: tuple[int, ...]
    layout: Layout


def resolve_group(process_group: object) -> dist.ProcessGroup | None:
    """The data-parallel group: the one given, else WORLD, else a group of one.

    Raises:
        LifecycleError: This rank is not in the group, or torchrun started several processes that were never connected.
    """
    if process_group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LifecycleError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialised: every process "
                "would train alone. Call torch.distributed.init_process_group(...) first"
            )
        return None
    outside = "this rank is not in process_group; make the optimizer on the group's members only"
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise LifecycleError(outside)
    if not isinstance(process_group, dist.ProcessGroup):
        raise PlanTypeError(f"process_group must be a ProcessGroup or None, got {type(process_group).__name__}")
    if dist.get_rank(process_group) < 0:
        raise LifecycleError(outside)
    return process_group


def agreed_blueprint(params: object, options: Options, group: dist.ProcessGroup | None) -> Blueprint:
    """Draw up this rank's blueprint and compare it with the others'. Collective.

    Raises:
        FreeholdError: What any rank found wrong, on all ranks.
        ConsistencyError: The ranks' models or arguments differ.
    """
    control = control_comm(group, options.timeout_s)
    blueprint, error, values = None, None, {}
    try:
        blueprint = draw_up(params, options, control.num_ranks)
        values = _values_to_compare(blueprint, options)
    except Exception as found:  # whatever it is, a user's policy or model may raise it, and no rank may leave alone
        error = found
    agree(control, error, values, doing="making a LayerwiseOptimizer")
    assert blueprint is not None, "agree() raises where a rank failed"
    return blueprint


def _values_to_compare(blueprint: Blueprint, options: Options) -> dict[str, str]:
    return {
        "layout fingerprint": blueprint.layout.fingerprint(),
        "rules": repr({kind: rule.label for kind, rule in sorted(options.rules.items())}),
        "param groups": options_text(blueprint.param_groups),
        "param group of each param": repr(blueprint.group_of),
        "reduce_dtype": str(options.reduce_dtype),
        "overlap": str(options.overlap),
        "verify_every": str(options.verify_every),
        "on_nonfinite": options.on_nonfinite,
        "grad_memory": str(options.grad_memory),
        "early_update": str(options.early_update),
        "timeout_s": str(options.timeout_s),
    }


def draw_up(params: object, options: Options, num_ranks: int) -> Blueprint:
    """Check the arguments, route the params, group them and plan. Purely local.

    Raises:
        FreeholdError: Whatever is wrong with the arguments.
    """
    _check_options(options)
    module, trainable, frozen = named_params_of(params)
    check_tensors(trainable)
    refuse_claimed(trainable)
    routes = route(module, trainable, list(options.groups))
    _check_rules(routes, options.rules)
    param_groups, group_of = _param_groups(routes, options)
    LiveOptions([group["rule"] for group in param_groups], group_of, routes, options.rules).check(param_groups)
    return Blueprint(
        module=module,
        routes=tuple(routes),
        frozen=tuple(frozen),
        param_groups=param_groups,
        group_of=group_of,
        layout=plan(
            _specs(routes),
            num_ranks=num_ranks,
            bucket_numel=options.bucket_numel,
            policy=options.policy,
            costs=options.costs,
        ),
    )


def _check_options(options: Options) -> None:
    check_timeout(options.timeout_s)
    if options.verify_every is not None and (type(options.verify_every) is not int or options.verify_every < 1):
        raise PlanError(f"verify_every must be an int of at least 1, or None, got {options.verify_every!r}")
    if options.grad_memory not in ("full", "sharded"):
        raise PlanError(f"grad_memory must be 'full' or 'sharded', got {options.grad_memory!r}")
    if options.on_nonfinite not in ("raise", "skip", "ignore"):
        raise PlanError(f"on_nonfinite must be 'raise', 'skip' or 'ignore', got {options.on_nonfinite!r}")
    if options.early_update and options.on_nonfinite != "ignore":
        raise PlanError(
            "early_update=True updates weights before all gradients are known, which "
            f"on_nonfinite={options.on_nonfinite!r} must look at first; pass on_nonfinite='ignore' as well, "
            "or leave early_update off"
        )
    if type(options.overlap) is not bool:
        raise PlanTypeError(f"overlap must be a bool, got {options.overlap!r}")
    if not isinstance(options.reduce_dtype, torch.dtype) or not options.reduce_dtype.is_floating_point:
        raise PlanTypeError(f"reduce_dtype must be a floating point torch.dtype, got {options.reduce_dtype!r}")
    for kind, rule in options.rules.items():
        if not isinstance(rule, Rule):
            raise PlanTypeError(
                f"{kind}= must be a freehold rule such as freehold.Muon(...), got {type(rule).__name__}; "
                "torch.optim optimizers are not rules"
            )
        if rule.kind != kind:
            raise RoutingError(f"{kind}= was given {type(rule).__name__}, a rule of kind {rule.kind!r}")
    if not isinstance(options.groups, (list, tuple)):
        raise PlanTypeError(f"groups must be a list of freehold.Group, got {type(options.groups).__name__}")
    for group in options.groups:
        if not isinstance(group, Group):
            raise PlanTypeError(f"groups must hold freehold.Group(pattern, ...), got {type(group).__name__}")


def _check_rules(routes: Sequence[Route], rules: Mapping[str, Rule]) -> None:
    kinds = {r.kind for r in routes}
    if "matrix" in rules and "matrix" not in kinds:
        shapes = ", ".join(f"{r.named.name} {tuple(r.named.param.shape)}: {r.reason}" for r in routes[:6])
        raise RoutingError(
            f"{type(rules['matrix']).__name__} was asked for, but no param is a matrix ({shapes}, ...): nothing "
            "would be orthogonalised. Route params to it with Group(pattern, rule='matrix'), or pass matrix=None"
        )
    for kind in sorted(kinds - set(rules)):
        names = [r.named.name for r in routes if r.kind == kind]
        raise RoutingError(f"{kind}= is None, but {len(names)} params need that rule, {names[0]!r} among them")


def _param_groups(routes: Sequence[Route], options: Options) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """One param group per ``Group`` and kind of rule that it holds, then the two defaults; empty ones are kept."""
    keys: list[tuple[int | None, str]] = []
    for index in range(len(options.groups)):
        kinds = {r.kind for r in routes if r.group == index}
        keys += [(index, kind) for kind in ("matrix", "elementwise") if kind in kinds]
    keys += [(None, kind) for kind in options.rules]
    position = {key: i for i, key in enumerate(keys)}
    param_groups: list[dict[str, Any]] = []
    for index, kind in keys:
        pattern, given = ("*", {}) if index is None else (options.groups[index].pattern, options.groups[index].options)
        merged = _merged_options(options.rules[kind], given, pattern)
        param_groups.append({"params": [], "rule": kind, "pattern": pattern, **merged})
    group_of = tuple(position[(r.group, r.kind)] for r in routes)
    for r, group in zip(routes, group_of, strict=True):
        param_groups[group]["params"].append(r.named.param)
    return param_groups, group_of


def _merged_options(rule: Rule, given: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    defaults = rule.defaults()
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise RoutingError(
            f"Group({pattern!r}) has options {unknown} that {type(rule).__name__} does not know; "
            f"it has {sorted(defaults)}"
        )
    merged = {**defaults, **given}
    rule.validate(merged)
    return merged


def _specs(routes: Sequence[Route]) -> list[ParamSpec]:
    specs: list[ParamSpec] = []
    for r in routes:
        param = r.named.param
        dtype = str(param.dtype).removeprefix("torch.")
        specs.append(ParamSpec(name=r.named.name, shape=r.planned_shape, dtype=dtype, rule=r.kind))
        specs += [
            ParamSpec(name=alias, shape=r.planned_shape, dtype=dtype, rule=r.kind, tied_to=r.named.name)
            for alias in r.named.aliases
        ]
    return specs


def build(blueprint: Blueprint, options: Options, comm: Comm) -> tuple[list[ManagedParam], list[BucketBuffers]]:
    """Allocate the buckets one by one and put the params under management. Collective: weights come from group rank 0.

    Returns:
        The params in model order and the buckets in bucket order.
    """
    position = {r.named.name: index for index, r in enumerate(blueprint.routes)}
    matrix_shapes = {spec.name: spec.matrix_shape for spec in blueprint.layout.params}
    buckets: list[BucketBuffers] = []
    pool = TensorPool()
    for bucket in blueprint.layout.buckets:
        indices = [position[name] for name in dict.fromkeys(slot.name for slot in bucket.slots)]
        first = blueprint.routes[indices[0]].named.param
        places = [_place(bucket, blueprint, index) for index in indices]
        memory = allocate_weights(
            bucket,
            [(place.start, place.param) for place in places],
            comm,
        )
        dtype = reduction_dtype(first.dtype, options.reduce_dtype)
        members = tuple(
            _managed(place, index, blueprint, matrix_shapes[place.name], dtype)
            for place, index in zip(places, indices, strict=True)
        )
        owned = bucket.slots_of_rank(comm.rank)
        grads = GradientBuffer(
            numel=bucket.numel,
            own_start=comm.rank * bucket.shard_numel,
            owned=owned,
            like=memory.weights,
            dtype=dtype,
            pool=pool if options.grad_memory == "sharded" else None,
        )
        buckets.append(BucketBuffers(bucket=bucket, params=members, owned=owned, memory=memory, grads=grads))
        buckets[-1].show_grads()
        kinds = sorted({blueprint.routes[index].kind for index in indices})
        allocate_state(buckets[-1], [options.rules[kind] for kind in kinds])
    if blueprint.module is not None:
        for buffer in blueprint.module.buffers():
            comm.broadcast_(buffer)
    return sorted((p for b in buckets for p in b.params), key=lambda p: p.index), buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A param, its slots, and its start in the bucket's address space."""

    name: str
    param: nn.Parameter
    slots: tuple[Slot, ...]
    start: int


def _place(bucket: Bucket, blueprint: Blueprint, index: int) -> _Place:
    named = blueprint.routes[index].named
    slots = blueprint.layout.slots_of(named.name)
    start = slots[0].rank * bucket.shard_numel + slots[0].offset
    return _Place(name=named.name, param=named.param, slots=slots, start=start)


def _managed(
    place: _Place, index: int, blueprint: Blueprint, matrix_shape: tuple[int, int] | None, grad_dtype: torch.dtype
) -> ManagedParam:
    param = place.param
    return ManagedParam(
        index=index,
        name=place.name,
        param=param,
        group=blueprint.group_of[index],
        bucket=blueprint.layout.bucket_of(place.name).index,
        slots=place.slots,
        matrix_shape=matrix_shape,
        grad_dtype=grad_dtype,
        version=param._version,
    )
