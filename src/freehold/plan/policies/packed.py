"""``packed``: bucket membership, packing and owners decided together, so that there is almost no padding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from freehold.errors import PlanError
from freehold.plan.bounds import buffer_bound, makespan_bound
from freehold.plan.policies._greedy import isolated_bucket
from freehold.plan.policies._packed.beam import EFFORTS, Beam
from freehold.plan.policies._packed.deal import deal
from freehold.plan.policies._packed.improve import improve
from freehold.plan.policies._packed.plans import KindPlan, Plans
from freehold.plan.policies._packed.portfolio import baselines, by_shape, shared_height
from freehold.plan.policies._packed.score import Scale, estimate, exposed_of_plan, measure
from freehold.plan.policies._packed.stock import Stock, take_stock
from freehold.plan.problem import PackedBucket, Problem

__all__ = ["PackedPolicy"]

_DEALT_ITEMS = 8_000
"""Plans are dealt and compared until about this many params have been dealt, at least one plan."""

_MANY_ITEMS = 10_000
"""With more params one effort that comes within the tolerance of the bound is enough."""

_RUNGS_FOR_CHOICE = 3
"""Efforts after which the search stops when it has met the bound."""

_MOST_DEALT = 10
"""Plans that are dealt and compared."""

_WORK_PER_PARAM = 4_000
"""Work of the search for a small problem, if ``effort`` allows more."""

_LEAST_EXPOSED = 3
"""So many of them for little exposure alone, whatever their makespan is estimated to be."""

_EXCHANGES = 150_000
"""Exchanges looked at to even out plans, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPolicy:
    """Few buffer elements first, then even cost, then little exposed communication. A policy: call it with a problem.

    A bucket need not hold what arrives together: a param may wait for a later bucket, so that each bucket takes what
    fills whole shards. Buckets are sought by a beam over counts of equal-sized params, with bins filled by exact subset
    sums; stacks run through the shards, cut between granules only; bins are dealt to ranks by accumulated cost. The
    result is never larger than that of ``threshold``, ``absorb`` and ``ns_cost``, for the best of all is kept.

    Attributes:
        max_growth: Largest bucket, as a multiple of max(bucket_numel, num_ranks x largest granule), or of the largest
            stack. A result of one of the other policies is kept even if it exceeds this.
        exposed_weight: Worth of exposed communication against padding: 0.1 means that 1% of the model less to send
            after backward is worth 0.1% of padding, or of makespan. 0 ignores exposure.
        padding_tolerance: Plans within this part of the model from the least padding compete on makespan and exposure.
        effort: Work that the search may do, in steps of about a microsecond (small problems need less). Never seconds,
            for those differ between ranks.

    Raises:
        PlanError: A knob out of range.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> sizes = (192, 128, 128, 256, 192, 192)
        >>> params = [ParamSpec(name=f"w{i}", shape=(n // 64, 64)) for i, n in enumerate(sizes)]
        >>> plan(params, num_ranks=2, bucket_numel=448, policy="absorb").numel
        1408
        >>> plan(params, num_ranks=2, bucket_numel=448, policy=PackedPolicy()).numel
        1152
    """

    max_growth: float = 2.2
    exposed_weight: float = 0.1
    padding_tolerance: float = 0.0025
    effort: int = 1_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.max_growth < math.inf:
            raise PlanError(f"PackedPolicy: max_growth must be at least 1, got {self.max_growth!r}")
        for name, value in (("exposed_weight", self.exposed_weight), ("padding_tolerance", self.padding_tolerance)):
            if not 0 <= value < math.inf:
                raise PlanError(f"PackedPolicy: {name} must be at least 0, got {value!r}")
        if self.effort < 0:
            raise PlanError(f"PackedPolicy: effort must be at least 0, got {self.effort!r}")

    def __call__(self, problem: Problem) -> tuple[PackedBucket, ...]:
        """Lay out ``problem``."""
        if all(item.isolated for item in problem.items):
            return tuple(isolated_bucket(problem, item) for item in problem.items)
        bound = buffer_bound(problem).active.value
        stock = take_stock(problem, growth=self.max_growth.as_integer_ratio(), bound=bound)
        plans = self._search(problem, stock)
        others = baselines(problem, plans.best if plans.found else None)
        height = min([shared_height(problem, buckets) for buckets in others], default=plans.best)
        scale = Scale(problem, makespan_bound(problem).cost, self.exposed_weight)
        candidates = self._dealt(problem, stock, plans, scale, height)
        least = min(height, *(shared_height(problem, c) for c in candidates)) if candidates else height
        allowed = min(height, least + self._slack(stock))
        candidates += [by_shape(problem, b) for b in others if shared_height(problem, b) <= allowed]
        return min(candidates, key=lambda buckets: measure(problem, buckets, scale))

    def _slack(self, stock: Stock) -> int:
        numerator, denominator = self.padding_tolerance.as_integer_ratio()
        return stock.total * numerator // (denominator * stock.num_ranks)

    def _search(self, problem: Problem, stock: Stock) -> Plans:
        """Plans by kinds. Efforts go on after one met the bound: they find plans with less exposure and makespan."""
        plans = Plans(stock, slack=self._slack(stock))
        beam = Beam(stock, plans)
        work = min(self.effort, _WORK_PER_PARAM * len(problem.items))
        many = len(problem.items) > _MANY_ITEMS
        for rung, effort in enumerate(EFFORTS):
            before = beam.work
            beam.run(effort, work)
            likely = 0 if rung == 0 else beam.work - before  # the first is the coarsest; the others do about the same
            is_exhausted = beam.work + likely > work
            is_met = plans.best <= stock.bound + (self._slack(stock) if many else 0)
            if is_exhausted or (is_met and (many or rung >= _RUNGS_FOR_CHOICE - 1)):
                break
        return plans

    def _dealt(
        self, problem: Problem, stock: Stock, plans: Plans, scale: Scale, most_height: int
    ) -> list[tuple[PackedBucket, ...]]:
        """The most promising plans, with params and ranks; equal padding counts by exposure first."""
        ranked = [plan for plan in plans.ranked() if plan.height <= most_height]
        wanted = max(1, min(_MOST_DEALT, _DEALT_ITEMS // len(problem.items)))
        ranked.sort(key=lambda plan: estimate(problem, stock, plan, scale))
        least_exposed = sorted(ranked, key=lambda plan: exposed_of_plan(problem, stock, plan, scale))
        chosen = [*ranked[: max(1, wanted - _LEAST_EXPOSED)], *least_exposed[:_LEAST_EXPOSED]][:wanted]
        unique = list(dict.fromkeys(chosen))
        return [self._finished(problem, stock, plan, scale, _EXCHANGES // len(unique)) for plan in unique]

    def _finished(
        self, problem: Problem, stock: Stock, plan: KindPlan, scale: Scale, exchanges: int
    ) -> tuple[PackedBucket, ...]:
        dealt = deal(problem, stock, plan)
        improve(dealt, stock, target=scale.cost_bound, work=exchanges)
        isolated = [isolated_bucket(problem, item) for item in problem.items if item.isolated]
        buckets = [*dealt.packed(stock), *isolated]
        return tuple(sorted(buckets, key=lambda bucket: max(p.index for p in bucket.placements)))
