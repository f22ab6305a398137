"""A model of one training step: what a layout costs in seconds on a given machine.

The step begins with backward and ends when the next forward has ended, so that both collectives fall inside it. The
order of events is that of the runtime:

1. Backward computes gradients in the reverse of model order. A bucket's reduce-scatter starts when its last gradient
   is there and the link is free; buckets are sent in bucket order, one at a time.
2. The update starts once backward and all reductions have ended, because the step first asks whether all gradients
   are finite and may clip them. Each rank runs Newton-Schulz on the matrices it owns, in reverse bucket order.
3. A bucket's all-gather starts when every rank has updated its part of it and the link is free.
4. Forward computes params in model order and waits where a param's bucket has not been gathered. It starts when the
   slowest rank has ended its update.

Assumptions. Each is simple on purpose: the model compares layouts, and does not predict a profile.

- Compute and communication overlap without slowing each other down; all ranks are alike.
- A weight of n elements costs 2 n flops a token in forward and 4 n in backward (Kaplan et al. 2020, section 2.1,
  https://arxiv.org/abs/2001.08361). Attention scores and elementwise functions are left out.
- A ring carries B bytes over N ranks in ``(N - 1) x latency + B x (N - 1) / N / bandwidth`` (Thakur, Rabenseifner and
  Gropp 2005, section 4.1, https://doi.org/10.1177/1094342005051521): the reduce-scatter in the reduction dtype and
  the all-gather in the params' own, both with padding.
- The update costs what Newton-Schulz costs (``newton_schulz_flops``). Momentum, AdamW, the norm and the agreement of
  the ranks are left out.
- With gradient accumulation this is the last micro-batch, which alone communicates; the others add compute only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freehold.errors import PlanError
from freehold.plan.bucket import Bucket
from freehold.plan.cost import newton_schulz_flops
from freehold.plan.layout import Layout
from freehold.plan.machine import Machine, Workload, element_bytes, ring_s
from freehold.plan.spec import ParamSpec

__all__ = ["Event", "EventKind", "Timeline", "simulate"]

_FORWARD_FLOPS = 2
_BACKWARD_FLOPS = 4
"""Per element of a weight and token, see the module's text."""

EventKind = Literal["backward", "reduce", "update", "gather", "forward"]
"""What is going on; ``reduce`` and ``gather`` occupy the link, the others the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A stretch of time in which one thing is going on.

    Attributes:
        kind: What.
        bucket: Which bucket; ``None`` where that has no meaning (``backward``, ``forward``).
        start_s: When it starts, from the start of backward.
        stop_s: When it ends. An ``update`` ends when the slowest rank has ended it.
    """

    kind: EventKind
    bucket: int | None
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of training.

    Attributes:
        backward_s: Compute of backward.
        exposed_reduce_s: From the end of backward to the end of the last reduction.
        update_s: Newton-Schulz of each rank.
        exposed_gather_s: Time that forward spends waiting for weights.
        forward_s: Compute of forward, without waiting.
        comm_s: Time that the link is in use.
        events: In the order in which they start.
    """

    backward_s: float
    exposed_reduce_s: float
    update_s: tuple[float, ...]
    exposed_gather_s: float
    forward_s: float
    comm_s: float
    events: tuple[Event, ...]

    @property
    def step_s(self) -> float:
        """Seconds from the start of backward to the end of the next forward."""
        return self.backward_s + self.exposed_comm_s + max(self.update_s) + self.forward_s

    @property
    def exposed_comm_s(self) -> float:
        """Time that the slowest rank spends on nothing but waiting for the link."""
        return self.exposed_reduce_s + self.exposed_gather_s

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(self.backward_s + update_s + self.forward_s for update_s in self.update_s)


def simulate(layout: Layout, *, machine: Machine, workload: Workload) -> Timeline:
    """Run one step of the model that the module's text describes.

    Args:
        layout: What to run; its params are in model order.
        machine: Rates and latency.
        workload: Tokens, and what they pass.

    Raises:
        PlanError: A param has an element type whose size is unknown; ``lookups`` names a param that is not there.

    Example:
        >>> from freehold.plan import plan
        >>> layout = plan([ParamSpec(name="w", shape=(1000, 1000))], num_ranks=2)
        >>> machine = Machine(link_bytes_per_s=1e9, link_latency_s=0, matmul_flops_per_s=1e12)
        >>> timeline = simulate(layout, machine=machine, workload=Workload(tokens_per_rank=1000))
        >>> timeline.backward_s, timeline.forward_s
        (0.004, 0.002)
        >>> round(timeline.exposed_reduce_s, 6), round(timeline.exposed_gather_s, 6), timeline.update_s
        (0.004, 0.002, (0.03, 0.0))
    """
    costs = [flops / machine.matmul_flops_per_s for flops in _flops_per_direction(layout, workload)]
    backward_s, ready_s = _backward(layout, costs)
    events = [Event(kind="backward", bucket=None, start_s=0.0, stop_s=backward_s)]
    link_free_s = 0.0
    for bucket in layout.buckets:
        start_s = max(link_free_s, ready_s[bucket.index])
        link_free_s = start_s + _reduce_s(bucket, machine, workload)
        events.append(Event(kind="reduce", bucket=bucket.index, start_s=start_s, stop_s=link_free_s))
    settled_s = max(backward_s, link_free_s)
    update_s = [0.0] * layout.num_ranks
    events += _updates(layout, settled_s, update_s, machine, workload)
    update_end_s = settled_s + max(update_s)
    gathers = _gathers(layout, [event for event in events if event.kind == "update"], machine)
    stretches = _forward(layout, costs, update_end_s, {event.bucket: event.stop_s for event in gathers})
    events += gathers + stretches
    forward_s = _FORWARD_FLOPS * sum(costs)
    return Timeline(
        backward_s=backward_s,
        exposed_reduce_s=settled_s - backward_s,
        update_s=tuple(update_s),
        exposed_gather_s=_waited(stretches, update_end_s),
        forward_s=forward_s,
        comm_s=sum(event.stop_s - event.start_s for event in events if event.kind in ("reduce", "gather")),
        events=tuple(sorted(events, key=lambda event: (event.start_s, event.stop_s))),
    )


def _flops_per_direction(layout: Layout, workload: Workload) -> list[int]:
    """Elements of each param that a token passes, times tokens; forward costs twice that in flops, backward four."""
    lookups = workload.lookups
    if lookups is None:
        first = layout.params[0]
        lookups = frozenset([first.name] if first.rule == "elementwise" and len(first.shape) == 2 else [])
    unknown = lookups - {spec.name for spec in layout.params}
    if unknown:
        raise PlanError(f"lookups names params that are not in the layout: {sorted(unknown)}")
    return [
        0 if spec.name in lookups else _active_numel(spec, workload) * workload.tokens_per_rank
        for spec in layout.params
    ]


def _active_numel(spec: ParamSpec, workload: Workload) -> int:
    is_stack = spec.rule == "matrix" and len(spec.shape) == 3
    if workload.experts_per_token is None or not is_stack:
        return spec.numel
    return spec.numel // spec.shape[0] * min(spec.shape[0], workload.experts_per_token)


def _backward(layout: Layout, costs: list[float]) -> tuple[float, list[float]]:
    """When backward ends, and when each bucket has all its gradients (a tied param's arrive with the later one)."""
    now = 0.0
    ready_s = [0.0] * len(layout.buckets)
    for spec, cost in zip(reversed(layout.params), reversed(costs), strict=True):
        now += _BACKWARD_FLOPS * cost
        ready_s[layout.bucket_of(spec.name).index] = now
    return now, ready_s


def _updates(
    layout: Layout, start_s: float, update_s: list[float], machine: Machine, workload: Workload
) -> list[Event]:
    """Newton-Schulz in reverse bucket order; fills ``update_s`` and tells when all ranks have updated each bucket."""
    seconds = {spec.name: _granule_s(spec, machine, workload) for spec in layout.params}
    events: list[Event] = []
    slowest_s = 0.0
    for bucket in reversed(layout.buckets):
        before_s = slowest_s
        if bucket.mode == "whole":
            for slot in bucket.slots:
                granule_numel, granule_s = seconds[slot.name]
                update_s[slot.rank] += slot.numel // granule_numel * granule_s
                slowest_s = max(slowest_s, update_s[slot.rank])
        events.append(Event(kind="update", bucket=bucket.index, start_s=start_s + before_s, stop_s=start_s + slowest_s))
    return events


def _granule_s(spec: ParamSpec, machine: Machine, workload: Workload) -> tuple[int, float]:
    shape = spec.matrix_shape
    flops = 0 if shape is None else newton_schulz_flops(*shape, num_steps=workload.newton_schulz_steps)
    return spec.granule, flops / machine.update_flops_per_s


def _gathers(layout: Layout, updates: list[Event], machine: Machine) -> list[Event]:
    events: list[Event] = []
    link_free_s = 0.0
    for update in updates:
        assert update.bucket is not None
        bucket = layout.buckets[update.bucket]
        start_s = max(link_free_s, update.stop_s)
        link_free_s = start_s + ring_s(bucket.numel * element_bytes(bucket.dtype), bucket.num_ranks, machine)
        events.append(Event(kind="gather", bucket=bucket.index, start_s=start_s, stop_s=link_free_s))
    return events


def _forward(layout: Layout, costs: list[float], start_s: float, current_s: dict[int | None, float]) -> list[Event]:
    """The stretches in which forward computes; between them it waits."""
    events: list[Event] = []
    since = now = start_s
    for spec, cost in zip(layout.params, costs, strict=True):
        arrives_s = current_s[layout.bucket_of(spec.name).index]
        if arrives_s > now:
            if now > since:
                events.append(Event(kind="forward", bucket=None, start_s=since, stop_s=now))
            since = now = arrives_s
        now += _FORWARD_FLOPS * cost
    events.append(Event(kind="forward", bucket=None, start_s=since, stop_s=now))
    return events


def _waited(stretches: list[Event], start_s: float) -> float:
    waited_s = 0.0
    for stretch in stretches:
        waited_s += stretch.start_s - start_s
        start_s = stretch.stop_s
    return waited_s


def _reduce_s(bucket: Bucket, machine: Machine, workload: Workload) -> float:
    dtype = "float64" if bucket.dtype == "float64" else workload.reduction_dtype
    return ring_s(bucket.numel * element_bytes(dtype), bucket.num_ranks, machine)
