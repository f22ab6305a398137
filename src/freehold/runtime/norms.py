"""The norm of the averaged gradients, one number with the same bits on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from freehold.errors import PlanError, PlanTypeError
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.comm import Comm

__all__ = ["all_finite", "check_norm_arguments", "global_norm", "nonfinite_names", "scale_gradients"]

# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6.
_CLIP_EPS = 1e-6


def check_norm_arguments(max_norm: object, norm_type: object) -> None:
    """Refuse what is no norm.

    Raises:
        PlanTypeError: Not a number.
        PlanError: Negative or NaN.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PlanTypeError(f"{name} must be a number, got {value!r}")
        if math.isnan(value) or value < 0 or (name == "norm_type" and value == 0):
            raise PlanError(f"{name} must be {'above' if name == 'norm_type' else 'at least'} 0, got {value}")


def global_norm(buckets: Sequence[BucketBuffers], norm_type: float, comm: Comm) -> Tensor:
    """The ``norm_type``-norm over all owned gradients of all ranks, a 0-d tensor; unused params count 0.

    Every rank adds the same partial sums in the same order, so the bits agree. A param's own sum is taken as torch
    takes it, slot by slot in the reduction dtype; the sums are added in float64.
    """
    grads = [b.grads.own[part.elements] for b in buckets for part in b.parts]
    norms = [torch.linalg.vector_norm(grad, norm_type).double() for grad in grads]
    local = torch.stack(norms).cpu() if norms else torch.zeros(1, dtype=torch.float64)
    if not bool(torch.isfinite(local).all()):  # squares above 1e38 overflow in fp32 although the gradient is finite
        local = torch.stack([torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) for grad in grads]).cpu()
    partial = torch.linalg.vector_norm(local, norm_type).reshape(1)
    total = torch.linalg.vector_norm(comm.exchange(partial).flatten(), norm_type)
    first = buckets[0].grads.own
    return total.to(dtype=torch.float64 if first.dtype == torch.float64 else torch.float32, device=first.device)


def scale_gradients(buckets: Sequence[BucketBuffers], norm: Tensor, max_norm: float) -> None:
    """Multiply the owned gradients by ``min(1, max_norm / (norm + 1e-6))``, as torch's ``clip_grad_norm_`` does."""
    coefficient = torch.clamp(max_norm / (norm + _CLIP_EPS), max=1.0)
    for bucket in buckets:
        bucket.grads.own.mul_(coefficient.to(bucket.grads.own.dtype))


def all_finite(buckets: Sequence[BucketBuffers], comm: Comm) -> bool:
    """Whether every gradient that any rank owns is finite; the same answer everywhere."""
    # One vectorised pass without a temporary, and inf and NaN come through it.
    peaks = [peak for b in buckets if b.owned for peak in torch.aminmax(b.grads.own)]
    bad = bool(peaks) and not bool(torch.isfinite(torch.stack([p.double() for p in peaks])).all())
    return int(comm.max_(torch.tensor([bad], dtype=torch.uint8))) == 0


def nonfinite_names(buckets: Sequence[BucketBuffers]) -> list[str]:
    """The params whose owned gradient holds inf or NaN on this rank."""
    return [
        part.param.name
        for b in buckets
        for part in b.parts
        if not bool(torch.isfinite(b.grads.own[part.elements]).all())
    ]
