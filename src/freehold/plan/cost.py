"""What a matrix costs its owner: the number that policies balance over ranks."""

from __future__ import annotations

from freehold.plan.layout import Layout
from freehold.plan.spec import ParamSpec

__all__ = ["granule_cost", "max_min_squared", "newton_schulz_flops", "param_cost", "rank_costs"]


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


def granule_cost(spec: ParamSpec) -> int:
    """Cost of one granule: ``max_min_squared`` of a matrix, the number of elements of anything else.

    Example:
        >>> granule_cost(ParamSpec(name="experts", shape=(8, 4, 2)))
        16
    """
    matrix = spec.matrix_shape
    return spec.granule if matrix is None else max_min_squared(*matrix)


def param_cost(spec: ParamSpec) -> int:
    """Cost of a whole param: the sum over its granules.

    Example:
        >>> param_cost(ParamSpec(name="experts", shape=(8, 4, 2)))
        128
        >>> param_cost(ParamSpec(name="norm", shape=(64,), rule="elementwise"))
        64
    """
    return spec.num_granules * granule_cost(spec)


def rank_costs(layout: Layout) -> tuple[int, ...]:
    """Newton-Schulz work of every rank, counted from the slots that it holds; flat buckets count nothing.

    Example:
        >>> from freehold.plan import plan
        >>> rank_costs(plan([ParamSpec(name="w", shape=(4, 2))], num_ranks=2))
        (16, 0)
    """
    granules = {spec.name: (spec.granule, granule_cost(spec)) for spec in layout.params}
    costs = [0] * layout.num_ranks
    for bucket in layout.buckets:
        if bucket.mode == "flat":
            continue
        for slot in bucket.slots:
            granule_numel, cost = granules[slot.name]
            costs[slot.rank] += slot.numel // granule_numel * cost
    return tuple(costs)
