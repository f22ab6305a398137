"""The two forms of the iteration: on the matrix itself, and on the Gram matrix of its shorter side.

[Note: Gram form]
Every step multiplies X by a polynomial of R = X X^T, and all these polynomials commute. So the steps can be taken on
the small symmetric R alone, collecting their product Q, and X is multiplied once:

    Z = b R + c R^2,   P = a I + Z,   Q <- Q P,   R <- P R P,   at last X <- Q X

What rounding does to it: R is wrong by about the unit roundoff u, so that eigenvalues that should be near 0 may come
out as -u. A step multiplies those by more than a^2, and they soon are so negative that P is far too large there. The
cure is a restart: X <- Q X, R <- X X^T, Q <- I, which makes R positive again. Restarts come before a step at which an
eigenvalue -2u would have grown beyond 0.15 (``restart_steps``): never in float32 with five steps of Jordan's quintic,
once in float16, twice in bfloat16. They also keep Q small, whose rounding multiplies the large singular values.
Keeping the multiple of I in Q apart as a number was tried and is worse in bfloat16 (error 0.04 for 0.012): Q - s I is
larger. Zhang, Amsel, Chen and Dao, Gram Newton-Schulz, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/; the
form, its two faults and restarting are theirs; they restart once, before the third step, in float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from freehold.rules.polar.coefficients import Schedule
from freehold.rules.polar.products import Workspace, affine_product, symmetric_product

__all__ = ["Operations", "gram_form", "gram_operations", "restart_steps", "standard_form", "standard_operations"]

_MAX_NEGATIVE = 0.15  # see [Note: Gram form]; there Jordan's P is 22% too large, for directions that are noise
_ROUNDINGS = 2.0


@lru_cache(maxsize=256)
def restart_steps(schedule: Schedule, dtype: torch.dtype) -> frozenset[int]:
    """Indices of the steps before which the Gram form restarts in this dtype; see [Note: Gram form].

    Example:
        >>> jordan = ((3.4445, -4.775, 2.0315),) * 5
        >>> [sorted(restart_steps(jordan, d)) for d in (torch.float32, torch.float16, torch.bfloat16)]
        [[], [3], [2, 4]]
    """
    fresh = _ROUNDINGS * torch.finfo(dtype).eps / 2
    restarts: set[int] = set()
    size = fresh
    for index, (a, b, c) in enumerate(schedule):
        if size > _MAX_NEGATIVE and size > fresh:
            restarts.add(index)
            size = fresh
        size *= (a + abs(b) * size + abs(c) * size**2) ** 2
    return frozenset(restarts)


def standard_form(x: Tensor, schedule: Schedule, work: Workspace, *, is_tall: bool, halves: bool) -> Tensor:
    """``X <- a X + (b A + c A^2) X`` with ``A = X X^T``, step by step; ``(.., m, n)``, returned as another tensor.

    With ``is_tall`` the Gram matrix is ``X^T X`` and multiplies from the right, so that nothing is transposed.
    """
    batch, short = tuple(x.shape[:-2]), min(x.shape[-2:])
    gram, poly = (work.take(name, (*batch, short, short), x) for name in ("gram", "poly"))
    for index, (a, b, c) in enumerate(schedule):
        _gram(x, gram, is_tall=is_tall, halves=halves)
        symmetric_product(gram, gram, gram, b, c, poly, halves=halves)
        out = work.take(f"x{index % 2}", tuple(x.shape), x)
        left, right = (x, poly) if is_tall else (poly, x)
        x = affine_product(x, left, right, a, 1.0, out)
    return x


def gram_form(x: Tensor, schedule: Schedule, work: Workspace, *, is_tall: bool, halves: bool) -> Tensor:
    """The same by [Note: Gram form]; ``(.., m, n)``, returned as another tensor unless there are no steps."""
    if not schedule:
        return x
    batch, short = tuple(x.shape[:-2]), min(x.shape[-2:])
    size = (*batch, short, short)
    restarts = restart_steps(schedule, x.dtype)
    gram = _gram(x, work.take("gram", size, x), is_tall=is_tall, halves=halves)
    spare, poly, total, other = (work.take(name, size, x) for name in ("spare", "poly", "total", "other"))
    is_fresh, num_applied = True, 0
    for index, (a, b, c) in enumerate(schedule):
        if index in restarts:
            x = _applied(total, x, work.take(f"x{num_applied % 2}", tuple(x.shape), x), is_tall=is_tall)
            _gram(x, gram, is_tall=is_tall, halves=halves)
            is_fresh, num_applied = True, num_applied + 1
        symmetric_product(gram, gram, gram, b, c, poly, halves=halves)
        if is_fresh:
            total.copy_(poly).diagonal(dim1=-2, dim2=-1).add_(a)
            is_fresh = False
        else:
            symmetric_product(total, total, poly, a, 1.0, other, halves=halves)
            total, other = other, total
        if index + 1 < len(schedule) and index + 1 not in restarts:
            symmetric_product(gram, gram, poly, a, 1.0, spare, halves=halves)
            symmetric_product(spare, poly, spare, a, 1.0, gram, halves=halves)
    return _applied(total, x, work.take(f"x{num_applied % 2}", tuple(x.shape), x), is_tall=is_tall)


def _gram(x: Tensor, out: Tensor, *, is_tall: bool, halves: bool) -> Tensor:
    left, right = (x.mT, x) if is_tall else (x, x.mT)
    return symmetric_product(None, left, right, 0.0, 1.0, out, halves=halves)


def _applied(total: Tensor, x: Tensor, out: Tensor, *, is_tall: bool) -> Tensor:
    return torch.matmul(x, total, out=out) if is_tall else torch.matmul(total, x, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """How many matrix products a form takes, with ``m`` the shorter and ``n`` the longer side.

    Attributes:
        num_grams: ``X X^T``: 2 m^2 n flops, a symmetric result.
        num_squares: Products of two m x m: 2 m^3 flops, a symmetric result.
        num_applied: m x m times X: 2 m^2 n flops.
    """

    num_grams: int
    num_squares: int
    num_applied: int


def standard_operations(schedule: Schedule) -> Operations:
    """Products of ``standard_form``.

    Example:
        >>> standard_operations(((2.0, -1.5, 0.5),) * 5)
        Operations(num_grams=5, num_squares=5, num_applied=5)
    """
    return Operations(num_grams=len(schedule), num_squares=len(schedule), num_applied=len(schedule))


def gram_operations(schedule: Schedule, dtype: torch.dtype) -> Operations:
    """Products of ``gram_form``.

    Example:
        >>> gram_operations(((3.4445, -4.775, 2.0315),) * 5, torch.float16)
        Operations(num_grams=2, num_squares=14, num_applied=2)
    """
    restarts = restart_steps(schedule, dtype)
    num_squares = 0
    for index in range(len(schedule)):
        num_squares += 1 if index == 0 or index in restarts else 2
        num_squares += 2 if index + 1 < len(schedule) and index + 1 not in restarts else 0
    passes = 1 + len(restarts) if schedule else 0
    return Operations(num_grams=passes, num_squares=num_squares, num_applied=passes)
