"""Newton-Schulz orthogonalisation: the nearest (semi-)orthogonal matrix, by matrix products alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from freehold.errors import RuleError

__all__ = ["newton_schulz"]

# Quintic whose slope at zero is maximal: Keller Jordan, https://kellerjordan.github.io/posts/muon/
COEFFICIENTS = (3.4445, -4.775, 2.0315)
NUM_STEPS = 5
EPS = 1e-7

# The least norm at which no square that matters vanishes in a float32 sum. It lies above torch's floor on the
# norm, eps = 1e-7 = 2**-23.25, so that from here on the floor is never reached. The norm itself tells an overflow.
SAFE_NORM_MIN = 2.0**-23

# The exponent field of IEEE 754 binary32 and binary64: what is left of a number is the power of two below it.
_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


@torch.no_grad()
def newton_schulz(
    grad: Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    num_steps: int = NUM_STEPS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    r"""Replace the singular values of each matrix by values near 1, and keep its singular vectors.

    With :math:`X_0 = G / \lVert G \rVert_F`, every step applies an odd quintic to the singular values:

    .. math:: X_{k+1} = a X_k + (b A + c A^2) X_k, \qquad A = X_k X_k^\top

    Five steps with the default coefficients take singular values of at least 0.002 of the norm into
    [0.68, 1.21]; bfloat16 adds about 0.01 to either side. They lift smaller ones by a factor of up to 485.

    **Scale.** The result does not depend on the scale of ``grad``: multiplying it by a power of two leaves
    every bit as it was, as long as that is exact (no element overflows or becomes subnormal). Where the norm
    lies between ``eps`` and 2**60, the bits on CPU are those of ``torch.optim.Muon``. Outside, torch's floor
    on the norm would shrink the result, or its norm would overflow; there the matrix is first divided by the
    power of two below its largest element, in its own precision. Zeros give exact zeros. A matrix that holds
    NaN or infinity gives all NaN.

    Args:
        grad: ``(M, N)``, or ``(B, M, N)`` for ``B`` independent matrices; any floating dtype; left unchanged.
            On CPU a batch is worked matrix by matrix, so that its bits are those of separate calls.
        coefficients: ``(a, b, c)``.
        num_steps: Number of iterations, from 0 to 99.
        eps: Accepted for ``torch.optim.Muon``'s signature. There it is a floor on the norm, which here only
            guards the division of an exactly zero matrix; no result depends on it.
        dtype: In which to compute. For ``float16``, matrices are normalised in float32 before the cast, so
            that it cannot overflow.

    Returns:
        A tensor of the shape of ``grad``, of type ``dtype``, outside autograd. For ``M > N`` it is a transposed view.

    Raises:
        RuleError: Not two or three dimensions, not three coefficients, or a number of steps out of range.

    Example:
        >>> import torch
        >>> out = newton_schulz(torch.diag(torch.tensor([3.0, -2.0])), dtype=torch.float64)
        >>> [round(x, 2) for x in out.diagonal().tolist()]
        [1.12, -0.68]

    References:
        Jordan et al., Muon: An optimizer for hidden layers, https://kellerjordan.github.io/posts/muon/
    """
    _check_arguments(grad, coefficients, num_steps, eps)
    if grad.ndim == 3 and len(grad) == 1:
        return _orthogonalised(grad[0], coefficients, num_steps, dtype).unsqueeze(0)
    if grad.ndim == 3 and grad.is_cpu:
        out = torch.empty(grad.shape, dtype=dtype)
        for index, matrix in enumerate(grad):
            out[index] = _orthogonalised(matrix, coefficients, num_steps, dtype)
        return out
    return _orthogonalised(grad, coefficients, num_steps, dtype)


def _check_arguments(grad: Tensor, coefficients: tuple[float, ...], num_steps: int, eps: float) -> None:
    if grad.ndim not in (2, 3):
        raise RuleError(f"newton_schulz: grad must be (M, N) or (B, M, N), got shape {tuple(grad.shape)}")
    if len(coefficients) != 3:
        raise RuleError(f"newton_schulz: coefficients must be exactly 3 values, got {coefficients!r}")
    if not 0 <= num_steps < 100:
        raise RuleError(f"newton_schulz: num_steps must be from 0 to 99, got {num_steps}")
    if not eps >= 0.0:
        raise RuleError(f"newton_schulz: eps must be >= 0, got {eps}")


def _orthogonalised(
    grad: Tensor, coefficients: tuple[float, float, float], num_steps: int, dtype: torch.dtype
) -> Tensor:
    # (.., M, N) -> (.., M, N); the Gram matrix is taken over the shorter dimension
    a, b, c = coefficients
    is_tall = grad.size(-2) > grad.size(-1)
    product = torch.addmm if grad.ndim == 2 else torch.baddbmm
    ortho = _normalised(grad.mT if is_tall else grad, dtype)
    for _ in range(num_steps):
        gram = ortho @ ortho.mT
        ortho = product(ortho, product(gram, gram, gram, beta=b, alpha=c), ortho, beta=a)
    return ortho.mT if is_tall else ortho


def _normalised(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """``(.., M, N)`` over its Frobenius norm, in ``dtype``; always a new tensor."""
    wide = torch.float32 if dtype == torch.float16 else dtype
    if grad.is_cpu:  # to read the norm is free here; on an accelerator the host would have to wait for it
        out = grad.to(wide, copy=True)
        norm = _norm(out)
        if SAFE_NORM_MIN <= norm.item() < math.inf:
            return out.div_(norm).to(dtype)
    base = grad if grad.dtype in _EXPONENT_BITS else grad.float()
    out = torch.div(base, _power_of_two_below_largest(base), out=torch.empty_like(base, dtype=wide))
    # The largest element is now at least 1, or 2**-52 if it was subnormal: only exact zeros meet the floor.
    return out.div_(_norm(out).clamp(min=2.0**-100)).to(dtype)


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
