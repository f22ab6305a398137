"""What a matrix costs its owner: the number that policies balance over ranks.

Costs are counted (``max_min_squared``) unless a table of them is given, from shapes ``(M, N)`` to positive ints such as
measured nanoseconds. A table must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from freehold.errors import PlanError
from freehold.plan.layout import Layout
from freehold.plan.spec import ParamSpec

__all__ = ["Costs", "flop_costs", "granule_cost", "max_min_squared", "newton_schulz_flops", "param_cost", "rank_costs"]


Costs = Mapping[tuple[int, int], int]
"""Cost of one matrix by its shape ``(M, N)``."""


def max_min_squared(rows: int, cols: int) -> int:
    """``max(M, N) * min(M, N)**2``: Newton-Schulz work up to a factor, as Megatron-LM's PR 6379 counts it.

    Example:
        >>> max_min_squared(1024, 4096)
        4294967296
    """
    return max(rows, cols) * min(rows, cols) ** 2


def newton_schulz_flops(rows: int, cols: int, num_steps: int = 5) -> int:
    """Floating-point operations of Newton-Schulz on one matrix, a multiply and an add counted apart.

    With ``m = min(M, N)`` and ``n = max(M, N)`` a step is ``A = X X^T`` (2 m^2 n), ``A A`` (2 m^3) and
    ``B X`` (2 m^2 n); sums of matrices are left out.

    Args:
        rows: ``M``.
        cols: ``N``.
        num_steps: Iterations of the quintic.

    Example:
        >>> newton_schulz_flops(10, 20, num_steps=1)
        10000
    """
    short, long = min(rows, cols), max(rows, cols)
    return num_steps * (4 * short**2 * long + 2 * short**3)


def flop_costs(params: Iterable[ParamSpec]) -> dict[tuple[int, int], int]:
    """The table of ``newton_schulz_flops`` for ``plan(costs=...)``: what ``packed`` balances by, and reports count in.

    ``max_min_squared`` takes a matrix of 512 x 2048 for four of 512 x 512; by flops it is three.

    Example:
        >>> flop_costs([ParamSpec(name="up", shape=(512, 2048))])
        {(512, 2048): 12079595520}
    """
    shapes = dict.fromkeys(spec.matrix_shape for spec in params)  # few, of perhaps 45,000 params
    return {shape: newton_schulz_flops(*shape) for shape in shapes if shape is not None}


def granule_cost(spec: ParamSpec, costs: Costs | None = None) -> int:
    """Cost of one granule: of a matrix by ``costs`` or ``max_min_squared``, of anything else its number of elements.

    Raises:
        PlanError: The table has no cost of such a matrix, or one that is no positive int.

    Example:
        >>> granule_cost(ParamSpec(name="experts", shape=(8, 4, 2)))
        16
        >>> granule_cost(ParamSpec(name="experts", shape=(8, 4, 2)), {(4, 2): 1200})
        1200
    """
    matrix = spec.matrix_shape
    if matrix is None:
        return spec.granule
    if costs is None:
        return max_min_squared(*matrix)
    cost = costs.get(matrix)
    if type(cost) is not int or cost < 1:
        raise PlanError(f"costs must hold a positive int for matrices {matrix} (param {spec.name!r}), got {cost!r}")
    return cost


def param_cost(spec: ParamSpec, costs: Costs | None = None) -> int:
    """Cost of a whole param: the sum over its granules.

    Example:
        >>> param_cost(ParamSpec(name="experts", shape=(8, 4, 2)))
        128
        >>> param_cost(ParamSpec(name="norm", shape=(64,), rule="elementwise"))
        64
    """
    return spec.num_granules * granule_cost(spec, costs)


def rank_costs(layout: Layout, costs: Costs | None = None) -> tuple[int, ...]:
    """Newton-Schulz work of every rank, counted from the slots that it holds; flat buckets count nothing.

    Example:
        >>> from freehold.plan import plan
        >>> rank_costs(plan([ParamSpec(name="w", shape=(4, 2))], num_ranks=2))
        (16, 0)
    """
    granules = {spec.name: (spec.granule, granule_cost(spec, costs)) for spec in layout.params if spec.mode == "whole"}
    totals = [0] * layout.num_ranks
    for bucket in layout.buckets:
        if bucket.mode == "flat":
            continue
        for slot in bucket.slots:
            granule_numel, cost = granules[slot.name]
            totals[slot.rank] += slot.numel // granule_numel * cost
    return tuple(totals)
