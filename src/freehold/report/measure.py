"""The figures of a layout, each beside what no layout can beat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from freehold.plan.bounds import BoundTerm, BufferBound, MakespanBound, buffer_bound, makespan_bound
from freehold.plan.bucket import Bucket, Mode
from freehold.plan.cost import flop_costs, param_cost, rank_costs
from freehold.plan.layout import Layout
from freehold.plan.machine import element_bytes
from freehold.plan.problem import Item, Problem, align_up, shard_unit
from freehold.plan.spec import ParamSpec

__all__ = ["LayoutReport", "RankBytes", "measure"]

_FAR = 0.01
"""A bound that forces more padding than this part of the model is explained."""

_UNEVEN = 1.1
"""So is one that forces the dearest rank to this many times the mean cost."""

_STATE_FIELDS: dict[Mode, int] = {"whole": 1, "flat": 2}
"""Tensors of optimizer state beside the master: Muon's momentum; AdamW's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What a rank holds in memory, in bytes.

    Attributes:
        params: Weights of all buckets, padding included.
        grads: Gradients of all buckets in fp32 (float64 for float64), padding included.
        state: fp32 masters of low-precision weights, Muon's momentum and AdamW's moments, of the rank that has most.
    """

    params: int
    grads: int
    state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.params + self.grads + self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """The figures of one layout.

    Attributes:
        policy: Name of the policy.
        num_ranks: Ranks of the data-parallel group.
        bucket_numel: Soft minimum of a bucket's real elements, or ``None``.
        num_params: Params, tied ones not counted.
        real_numel: Elements that belong to params.
        buffer_numel: Elements of all buffers.
        lower_bound_numel: The least that ``buffer_numel`` can be.
        makespan: Newton-Schulz work of the dearest rank, in flops (``newton_schulz_flops``).
        makespan_lower_bound: The least that ``makespan`` can be.
        num_buckets: How many collectives each way.
        largest_bucket_numel: Elements of the largest bucket, padding included.
        bytes_per_rank: Memory.
        plan_s: Seconds that planning took.
        advice: Where a bound is far from ideal: which param causes it, and what would help.
    """

    policy: str
    num_ranks: int
    bucket_numel: int | None
    num_params: int
    real_numel: int
    buffer_numel: int
    lower_bound_numel: int
    makespan: int
    makespan_lower_bound: int
    num_buckets: int
    largest_bucket_numel: int
    bytes_per_rank: RankBytes
    plan_s: float
    advice: tuple[str, ...]

    @property
    def padding_numel(self) -> int:
        """Buffer elements that belong to no param."""
        return self.buffer_numel - self.real_numel

    @property
    def padding_fraction(self) -> float:
        """Padding over real elements."""
        return self.padding_numel / self.real_numel

    @property
    def padding_fraction_lower_bound(self) -> float:
        """The least that ``padding_fraction`` can be."""
        return (self.lower_bound_numel - self.real_numel) / self.real_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The params of one mode and dtype, which share no bucket with others."""

    mode: Mode
    dtype: str
    specs: tuple[ParamSpec, ...]
    problem: Problem


def measure(layout: Layout, *, plan_s: float) -> LayoutReport:
    """All figures of a layout.

    Args:
        layout: The layout.
        plan_s: Seconds that planning took.

    Raises:
        PlanError: A param's element type is unknown, so that its bytes are too.

    Example:
        >>> from freehold.plan import plan
        >>> params = [ParamSpec(name=f"layers.{i}", shape=(64, 64)) for i in range(3)]
        >>> report = measure(plan(params, num_ranks=2), plan_s=0.0)
        >>> report.padding_numel, report.lower_bound_numel, report.makespan_lower_bound // 64**3
        (4096, 16384, 2)
    """
    groups = _groups(layout)
    bounds = [(group, buffer_bound(group.problem)) for group in groups if group.mode == "whole"]
    work = makespan_bound(_all_work(groups, layout))
    flat_numel = sum(_flat_bound(group.problem) for group in groups if group.mode == "flat")
    return LayoutReport(
        policy=layout.policy,
        num_ranks=layout.num_ranks,
        bucket_numel=layout.bucket_numel,
        num_params=sum(len(group.specs) for group in groups),
        real_numel=layout.real_numel,
        buffer_numel=layout.numel,
        lower_bound_numel=flat_numel + sum(bound.numel for _, bound in bounds),
        makespan=max(rank_costs(layout, flop_costs(layout.params))),
        makespan_lower_bound=work.cost,
        num_buckets=len(layout.buckets),
        largest_bucket_numel=max(bucket.numel for bucket in layout.buckets),
        bytes_per_rank=_rank_bytes(layout),
        plan_s=plan_s,
        advice=(*_padding_advice(bounds, layout), *_work_advice(work, groups, layout)),
    )


def _groups(layout: Layout) -> tuple[_Group, ...]:
    members: dict[tuple[Mode, str], list[ParamSpec]] = {}
    for spec in reversed(layout.params):
        if spec.tied_to is None:
            members.setdefault((spec.mode, spec.dtype), []).append(spec)
    return tuple(
        _Group(mode=mode, dtype=dtype, specs=tuple(specs), problem=_problem(specs, layout))
        for (mode, dtype), specs in members.items()
    )


def _problem(specs: Iterable[ParamSpec], layout: Layout) -> Problem:
    items: list[Item] = []
    costs = flop_costs(layout.params)
    kinds: dict[tuple[object, ...], Item] = {}  # a model has few kinds of params, and may have 45,000 of them
    for index, spec in enumerate(specs):
        kind = (spec.shape, spec.rule, spec.granule_numel, spec.isolated)
        if kind not in kinds:
            kinds[kind] = Item(
                index=index,
                numel=spec.numel,
                granule_numel=spec.granule,
                cost=param_cost(spec, costs),
                isolated=spec.isolated,
                shape=spec.shape,
            )
        items.append(replace(kinds[kind], index=index))
    return Problem(
        items=tuple(items),
        num_ranks=layout.num_ranks,
        bucket_numel=layout.bucket_numel,
        alignment=layout.alignment,
        shard_unit=shard_unit(layout.num_ranks, layout.alignment, high_busbw=layout.high_busbw),
    )


def _all_work(groups: Iterable[_Group], layout: Layout) -> Problem:
    """The matrices of all dtypes together: a rank updates them one after the other."""
    return _problem([spec for group in groups if group.mode == "whole" for spec in group.specs], layout)


def _flat_bound(problem: Problem) -> int:
    """Slots start on aligned addresses and shards are equal; one bucket for all that may share one is the least."""
    unit = problem.num_ranks * problem.shard_unit
    together = sum(align_up(item.numel, problem.alignment) for item in problem.items if not item.isolated)
    return align_up(together, unit) + sum(align_up(item.numel, unit) for item in problem.items if item.isolated)


def _rank_bytes(layout: Layout) -> RankBytes:
    """As the runtime allocates: buffers in full, masters and state up to the end of the rank's last slot."""
    params = grads = 0
    state = [0] * layout.num_ranks
    for bucket in layout.buckets:
        itemsize = element_bytes(bucket.dtype)
        params += bucket.numel * itemsize
        grads += bucket.numel * max(4, itemsize)
        per_element = (4 if itemsize < 4 else 0) + max(4, itemsize) * _STATE_FIELDS[bucket.mode]
        for rank, extent in _extents(bucket).items():
            state[rank] += extent * per_element
    return RankBytes(params=params, grads=grads, state=max(state))


def _extents(bucket: Bucket) -> dict[int, int]:
    """How far the shard of each rank is filled; slots are sorted by address, so a rank's last one counts."""
    return {slot.rank: slot.offset + slot.numel for slot in bucket.slots}


def _padding_advice(bounds: Iterable[tuple[_Group, BufferBound]], layout: Layout) -> Iterable[str]:
    for group, bound in bounds:
        if bound.padding_numel > _FAR * layout.real_numel:
            yield f"Matrices of {group.dtype}: {bound.explain()}{_cause(bound.active, group.specs)}"


def _cause(term: BoundTerm, specs: tuple[ParamSpec, ...]) -> str:
    return "" if term.item is None else f" The param is {specs[term.item.index].name} (or one like it)."


def _work_advice(work: MakespanBound, groups: tuple[_Group, ...], layout: Layout) -> Iterable[str]:
    specs = [spec for group in groups if group.mode == "whole" for spec in group.specs]
    total = sum(item.cost for group in groups if group.mode == "whole" for item in group.problem.items)
    item = work.active.item
    if item is None or work.cost * layout.num_ranks <= _UNEVEN * total:
        return
    times = work.cost * layout.num_ranks / total
    yield (
        f"Newton-Schulz: some rank has at least {times:.2f} times the mean work, because of {specs[item.index].name}, "
        f"shape {specs[item.index].shape}, and the params that are as dear. Fewer ranks, or sub-groups of ranks, help."
    )
