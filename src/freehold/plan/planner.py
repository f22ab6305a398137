"""``plan``: from params to a layout.

Arguments are checked here, policies decide, and what they decide is turned into slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import cast

from freehold.errors import LayoutError, PlanError, PlanTypeError
from freehold.plan.bucket import Bucket, Mode, Slot
from freehold.plan.cost import Costs, flop_costs, param_cost
from freehold.plan.flat import flat_buckets
from freehold.plan.layout import Layout
from freehold.plan.policies import policy_label, resolve_policy
from freehold.plan.policies.packed import PackedPolicy
from freehold.plan.problem import Item, PackedBucket, Placement, Policy, Problem, shard_unit
from freehold.plan.spec import ParamSpec

__all__ = ["default_bucket_numel", "plan"]


def plan(
    params: Iterable[ParamSpec],
    *,
    num_ranks: int,
    bucket_numel: int | str | None = None,
    policy: str | Policy = "packed",
    alignment: int = 64,
    high_busbw: bool = False,
    costs: Costs | None = None,
) -> Layout:
    """Decide which rank owns which param, in which bucket, at which offset. Pure and deterministic.

    Args:
        params: The params in model order.
        num_ranks: Ranks of the data-parallel group.
        bucket_numel: Soft minimum of a bucket's real elements. ``None`` makes one bucket of each mode and
            dtype, ``"default"`` is ``default_bucket_numel``.
        policy: A name of ``policy_names()``, or a callable from a ``Problem`` to packed buckets.
        alignment: Slots begin on multiples of this many elements, a power of two.
        high_busbw: Pad buckets to multiples of 2**16 elements too, for NCCL's bus bandwidth.
        costs: What one matrix of each shape ``(M, N)`` costs, as positive ints (measured nanoseconds, say). ``None``
            counts flops for ``packed``, and for all others ``max_min_squared``, as Megatron-LM does. Ranks that plan
            for themselves must have equal tables.

    Returns:
        The layout. Params of different dtype, and those updated as matrices and element by element, are in
        buckets of their own.

    Raises:
        PlanError: The problem cannot be laid out as stated.
        PlanTypeError: An argument of the wrong type.
        LayoutError: A policy gave an unusable answer.

    Example:
        >>> params = [ParamSpec(name=f"layers.{i}.weight", shape=(256, 64)) for i in range(8)]
        >>> layout = plan(params, num_ranks=4, bucket_numel=65536)
        >>> len(layout.buckets), layout.padding_numel, layout.owner("layers.7.weight")
        (2, 0, 0)
    """
    specs = _checked_params(params)
    _check_numbers(num_ranks=num_ranks, bucket_numel=bucket_numel, alignment=alignment, high_busbw=high_busbw)
    decide = resolve_policy(policy)
    label = policy_label(policy)
    untied = [spec for spec in reversed(specs) if spec.tied_to is None]
    if bucket_numel == "default":
        bucket_numel = default_bucket_numel(sum(spec.numel for spec in untied), num_ranks)
    frame = Problem(
        items=(),
        num_ranks=num_ranks,
        bucket_numel=cast("int | None", bucket_numel),
        alignment=alignment,
        shard_unit=shard_unit(num_ranks, alignment, high_busbw=high_busbw),
    )
    return Layout(
        num_ranks=num_ranks,
        alignment=alignment,
        high_busbw=high_busbw,
        bucket_numel=frame.bucket_numel,
        policy=label,
        params=specs,
        buckets=_all_buckets(untied, frame, decide, label, _costs_for(decide, specs) if costs is None else costs),
    )


def _costs_for(decide: Policy, specs: tuple[ParamSpec, ...]) -> Costs | None:
    return flop_costs(specs) if isinstance(decide, PackedPolicy) else None


def default_bucket_numel(real_numel: int, num_ranks: int) -> int:
    """What ``bucket_numel="default"`` means: ``min(max(40e6, 1e6 x ranks), real elements / 8)``, at least 1.

    The inner maximum is the default of Megatron-LM's distributed optimizer; an eighth of the model keeps
    several collectives to overlap in small models.

    Example:
        >>> default_bucket_numel(8_000_000_000, 64), default_bucket_numel(8_000_000, 64)
        (64000000, 1000000)
    """
    return max(1, min(max(40_000_000, 1_000_000 * num_ranks), real_numel // 8))


def _refuse_unordered(params: object) -> None:
    if isinstance(params, (Set, Mapping, str)) or not isinstance(params, Iterable):
        kind = type(cast("object", params)).__name__
        raise PlanTypeError(f"params must be ParamSpecs in model order (a list, say), got a {kind}")


def _checked_params(params: Iterable[ParamSpec]) -> tuple[ParamSpec, ...]:
    _refuse_unordered(params)
    specs = tuple(params)
    for index, spec in enumerate(specs):
        if type(spec) is not ParamSpec:
            raise PlanTypeError(f"params[{index}] must be a ParamSpec, got {spec!r:.80}")
    if not specs:
        raise PlanError("params is empty: there is nothing to plan")
    counts = Counter(spec.name for spec in specs)
    problems = [f"param {name!r} is given {count} times" for name, count in counts.items() if count > 1]
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        problems += _tie_problems(spec, by_name)
    if all(spec.tied_to is not None for spec in specs):
        problems.append("every param is tied to another one")
    if problems:
        raise PlanError("\n".join(problems))
    return specs


def _tie_problems(spec: ParamSpec, by_name: dict[str, ParamSpec]) -> list[str]:
    if spec.tied_to is None:
        return []
    source = by_name.get(spec.tied_to)
    if source is None:
        return [f"param {spec.name!r} is tied to {spec.tied_to!r}, which is not among params"]
    if source.tied_to is not None:
        return [f"param {spec.name!r} is tied to {spec.tied_to!r}, which is tied to {source.tied_to!r} itself"]
    if (spec.shape, spec.dtype) != (source.shape, source.dtype):
        return [
            f"param {spec.name!r} of {spec.dtype} {spec.shape} is tied to {spec.tied_to!r} "
            f"of {source.dtype} {source.shape}"
        ]
    return []


def _check_numbers(*, num_ranks: object, bucket_numel: object, alignment: object, high_busbw: object) -> None:
    wrong_types: list[str] = []
    wrong_values: list[str] = []
    if type(num_ranks) is not int:
        wrong_types.append(f"num_ranks must be an int, got {num_ranks!r}")
    elif num_ranks < 1:
        wrong_values.append(f"num_ranks must be at least 1, got {num_ranks}")
    if bucket_numel == "auto":
        wrong_values.append(
            "bucket_numel='auto' depends on the machine: pass "
            "bucket_numel=choose_bucket_numel(params, machine=..., workload=..., ...), which freehold.plan exports"
        )
    elif isinstance(bucket_numel, str):
        if bucket_numel != "default":
            wrong_values.append(f"bucket_numel must be an int, None or 'default', got {bucket_numel!r}")
    elif type(bucket_numel) is int:
        if bucket_numel < 1:
            wrong_values.append(f"bucket_numel must be at least 1, got {bucket_numel}; None makes one bucket")
    elif bucket_numel is not None:
        wrong_types.append(f"bucket_numel must be an int, None or 'default', got {bucket_numel!r}")
    if type(alignment) is not int:
        wrong_types.append(f"alignment must be an int, got {alignment!r}")
    elif alignment < 1 or alignment & (alignment - 1):
        wrong_values.append(f"alignment must be a power of two, got {alignment}")
    if type(high_busbw) is not bool:
        wrong_types.append(f"high_busbw must be a bool, got {high_busbw!r}")
    if wrong_types:
        raise PlanTypeError("\n".join(wrong_types + wrong_values))
    if wrong_values:
        raise PlanError("\n".join(wrong_values))


def _all_buckets(
    untied: list[ParamSpec], frame: Problem, decide: Policy, label: str, costs: Costs | None
) -> tuple[Bucket, ...]:
    """Plan each (mode, dtype) on its own, then put all buckets into the order in which they become ready."""
    groups: dict[tuple[Mode, str], list[int]] = {}
    for position, spec in enumerate(untied):
        groups.setdefault((spec.mode, spec.dtype), []).append(position)
    unplaced: list[tuple[int, Bucket]] = []
    for (mode, _), positions in groups.items():
        specs = [untied[position] for position in positions]
        problem = replace(frame, items=_items(specs, costs))
        packed = flat_buckets(problem) if mode == "flat" else decide(problem)
        _verify(problem, packed, label)
        for entry in packed:
            ready = positions[max(placement.index for placement in entry.placements)]
            unplaced.append((ready, _bucket(entry, specs, mode=mode, num_ranks=frame.num_ranks)))
    unplaced.sort(key=lambda pair: pair[0])
    buckets: list[Bucket] = []
    start = 0
    for index, (_, bucket) in enumerate(unplaced):
        buckets.append(replace(bucket, index=index, start=start))
        start += bucket.numel
    return tuple(buckets)


def _items(specs: list[ParamSpec], costs: Costs | None) -> tuple[Item, ...]:
    """The params as policies see them. Each kind is measured once: a model has few kinds."""
    measures: dict[tuple[object, ...], tuple[int, int, int, int]] = {}
    items: list[Item] = []
    for index, spec in enumerate(specs):
        kind = (spec.shape, spec.rule, spec.granule_numel)
        if kind not in measures:
            measures[kind] = (spec.numel, spec.granule, param_cost(spec, costs), param_cost(spec))
        numel, granule_numel, cost, counted_cost = measures[kind]
        items.append(
            Item(
                index=index,
                numel=numel,
                granule_numel=granule_numel,
                cost=cost,
                isolated=spec.isolated,
                shape=spec.shape,
                counted_cost=counted_cost,
            )
        )
    return tuple(items)


def _verify(problem: Problem, packed: tuple[PackedBucket, ...], label: str) -> None:
    """Every item exactly once, inside its bucket: what the conversion to slots relies on.

    ``Layout.problems()`` checks everything else.
    """
    times = [0] * len(problem.items)
    for entry in packed:
        if not entry.placements:
            raise LayoutError(f"policy {label!r} made a bucket without params")
        if entry.shard_numel < 1 or entry.shard_numel % problem.shard_unit:
            raise LayoutError(
                f"policy {label!r} made shards of {entry.shard_numel} elements, no multiple of {problem.shard_unit}"
            )
        for placement in entry.placements:
            if not 0 <= placement.index < len(times):
                raise LayoutError(f"policy {label!r} placed item {placement.index} of {len(times)}")
            times[placement.index] += 1
            address = placement.rank * entry.shard_numel + placement.offset
            stop = address + problem.items[placement.index].numel
            if (
                not 0 <= placement.offset < entry.shard_numel
                or address < 0
                or stop > problem.num_ranks * entry.shard_numel
            ):
                raise LayoutError(f"policy {label!r} placed item {placement.index} outside its bucket: {placement}")
    wrong = {index: count for index, count in enumerate(times) if count != 1}
    if wrong:
        raise LayoutError(f"policy {label!r} must place every item once; times placed by item: {wrong!r:.200}")


def _bucket(entry: PackedBucket, specs: list[ParamSpec], *, mode: Mode, num_ranks: int) -> Bucket:
    slots: list[Slot] = []
    for placement in entry.placements:
        slots += _slots(placement, specs[placement.index], entry.shard_numel)
    slots.sort(key=lambda slot: (slot.rank, slot.offset))
    return Bucket(
        index=0,
        mode=mode,
        dtype=specs[0].dtype,
        num_ranks=num_ranks,
        start=0,
        shard_numel=entry.shard_numel,
        slots=tuple(slots),
    )


def _slots(placement: Placement, spec: ParamSpec, shard_numel: int) -> list[Slot]:
    """Cut a param where its range of addresses crosses shard edges."""
    slots: list[Slot] = []
    rank, offset, start, numel = placement.rank, placement.offset, 0, spec.numel
    if offset + numel <= shard_numel:  # nearly all of them: one slot
        return [Slot(name=spec.name, rank=rank, offset=offset, start=0, stop=numel)]
    while start < numel:
        stop = min(numel, start + shard_numel - offset)
        slots.append(Slot(name=spec.name, rank=rank, offset=offset, start=start, stop=stop))
        rank, offset, start = rank + 1, 0, stop
    return slots
