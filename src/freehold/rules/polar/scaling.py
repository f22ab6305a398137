"""Matrices brought to norm 1 before the iteration, whatever their scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

__all__ = ["normalised"]

# The least norm at which no square that matters vanishes in a float32 sum. It lies above torch's floor on the
# norm, eps = 1e-7 = 2**-23.25, so that from here on the floor is never reached. The norm itself tells an overflow.
SAFE_NORM_MIN = 2.0**-23

# The exponent field of IEEE 754 binary32 and binary64: what is left of a number is the power of two below it.
_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


def normalised(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """``(.., M, N)`` over its Frobenius norm, in ``dtype``; always a new tensor, strided as ``grad`` is."""
    wide = torch.float32 if dtype == torch.float16 else dtype
    if grad.is_cpu:  # to read the norm is free here; on an accelerator the host would have to wait for it
        out = grad.to(wide, copy=True)
        norm = _norm(out)
        if _all_safe(norm):
            return out.div_(norm).to(dtype)
    base = grad if grad.dtype in _EXPONENT_BITS else grad.float()
    out = torch.div(base, _power_of_two_below_largest(base), out=torch.empty_like(base, dtype=wide))
    # The largest element is now at least 1, or 2**-52 if it was subnormal: only exact zeros meet the floor.
    return out.div_(_norm(out).clamp(min=2.0**-100)).to(dtype)


def _all_safe(norms: Tensor) -> bool:
    """``(.., 1, 1)``: a batch with one matrix that is not safe takes the long way as a whole; the bits are the same."""
    values = cast("list[float]", norms.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
    return all(SAFE_NORM_MIN <= value < math.inf for value in values)


def _power_of_two_below_largest(base: Tensor) -> Tensor:
    """``(.., M, N)`` -> ``(.., 1, 1)``: a normal power of two; infinity where a matrix is not finite.

    Divided by infinity, infinite elements become NaN and NaN stays NaN, and so does all that follows.
    """
    integer, mask = _EXPONENT_BITS[base.dtype]
    power = _norm(base, torch.inf).view(integer).bitwise_and(mask).view(base.dtype)
    return power.clamp(min=torch.finfo(base.dtype).tiny)


def _norm(matrix: Tensor, order: float = 2.0) -> Tensor:
    """Norm of the elements: ``(.., M, N)`` -> ``(.., 1, 1)``."""
    vector_norm = cast("Callable[..., Tensor]", torch.linalg.vector_norm)  # pyright: ignore[reportUnknownMemberType]
    return vector_norm(matrix, order, dim=(-2, -1), keepdim=True)
