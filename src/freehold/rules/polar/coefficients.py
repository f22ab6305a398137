"""Coefficient sets of the odd quintic ``a x + b x^3 + c x^5``, and the schedule of one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from freehold.errors import RuleError

__all__ = ["COEFFICIENT_SETS", "JORDAN", "Coefficients", "Schedule", "is_coefficients", "schedule_of"]

Triple = tuple[float, float, float]
Schedule = tuple[Triple, ...]
"""``(a, b, c)`` of every step."""

Coefficients = Triple | Schedule | str
"""One triple for all steps, a triple for each step (the last is repeated), or the name of a set."""

# The slope at zero is maximal; values end in [0.68, 1.21] and do not converge. torch.optim.Muon's.
# Keller Jordan, https://kellerjordan.github.io/posts/muon/
JORDAN: Triple = (3.4445, -4.775, 2.0315)

# Minimax-optimal step by step for singular values in [0.001, 1]: Amsel, Persson, Musco and Gower, The Polar Express,
# https://arxiv.org/abs/2505.16932, the list of their section 3. The last is the fixed quintic that it tends to.
_POLAR_EXPRESS: Schedule = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# Every quintic but the last is stretched by 1%, so that rounding cannot push a value out of the interval that the
# next one was made for: ibid., section 3.4.
POLAR_EXPRESS_SAFETY = 1.01


def _stretched(triple: Triple, factor: float) -> Triple:
    a, b, c = triple
    return a / factor, b / factor**3, c / factor**5


# Newton-Schulz of order 5, the Taylor polynomial of the sign function about 1: a value in (0, 1] converges to 1
# monotonically, the error cubed at each step once it is small. It grows small values by 15/8 a step only, so that it
# takes many: 12 for values of at least 0.01.
# Bjorck and Bowie, An Iterative Algorithm for Computing the Best Estimate of an Orthogonal Matrix, SIAM J. Numer.
# Anal. 8 (1971); Higham, Functions of Matrices (2008), section 8.3.
_EXACT: Triple = (15 / 8, -10 / 8, 3 / 8)

COEFFICIENT_SETS: dict[str, Schedule] = {
    "jordan": (JORDAN,),
    "polar_express": (
        *(_stretched(triple, POLAR_EXPRESS_SAFETY) for triple in _POLAR_EXPRESS[:-1]),
        _POLAR_EXPRESS[-1],
    ),
    "exact": (_EXACT,),
}


def schedule_of(coefficients: Coefficients, num_steps: int) -> Schedule:
    """The triple of every step; where a set is shorter, its last triple is repeated.

    Example:
        >>> schedule_of((2.0, -1.5, 0.5), 2)
        ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
        >>> len(schedule_of("polar_express", 10)), schedule_of("polar_express", 10)[-1]
        (10, (1.875, -1.25, 0.375))

    Raises:
        RuleError: Neither three numbers, nor a sequence of such triples, nor the name of a set.
    """
    if not is_coefficients(coefficients):
        raise RuleError(
            "newton_schulz: coefficients must be exactly 3 values, a sequence of such triples, or one of "
            f"{sorted(COEFFICIENT_SETS)}, got {coefficients!r}"
        )
    if isinstance(coefficients, str):
        triples = COEFFICIENT_SETS[coefficients]
    elif _is_triple(coefficients):
        triples = (cast("Triple", coefficients),)
    else:
        triples = cast("Schedule", coefficients)
    return tuple(triples[min(step, len(triples) - 1)] for step in range(num_steps))


def is_coefficients(value: Any) -> bool:
    """Whether a value is what ``Coefficients`` says."""
    if isinstance(value, str):
        return value in COEFFICIENT_SETS
    if not isinstance(value, Sequence):
        return False
    items = cast("Sequence[Any]", value)
    return _is_triple(items) or (len(items) > 0 and all(_is_triple(item) for item in items))


def _is_triple(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    items = cast("Sequence[Any]", value)
    return len(items) == 3 and all(isinstance(item, (int, float)) for item in items)
