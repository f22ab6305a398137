"""The placeholder that ``p.grad`` shows once a gradient has moved into its bucket. See [Note: Gradient markers]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from freehold.errors import LifecycleError

__all__ = ["GradientMarker", "make_marker"]


class GradientMarker(Tensor):
    """A NaN expanded to the param's shape. It reads as NaN; what torch cannot do to it says what to call instead."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` as on a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return func(*args, **(kwargs or {}))
            except (RuntimeError, ValueError) as error:
                raise LifecycleError(_explanation(func)) from error


def make_marker(like: Tensor) -> tuple[GradientMarker, Tensor]:
    """A marker in the shape, dtype and device of ``like``, and the scalar behind it.

    The two share a version counter; that of the scalar is read without a detour through ``__torch_function__``.
    """
    nan = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
    return nan.expand(like.shape).as_subclass(GradientMarker), nan


def _explanation(func: Callable[..., Any]) -> str:
    what = "p.grad is a placeholder: the averaged gradient is in its bucket, on the rank that owns it. "
    if "unscale" in repr(func):  # not every callable of torch has a __name__
        return what + "Scale losses with freehold.GradScaler, which unscales it there (torch.amp.GradScaler cannot)"
    return what + (
        "Clip with opt.clip_grad_norm_(...) of the LayerwiseOptimizer instead of torch.nn.utils; change gradients "
        "inside opt.no_sync(), before they are reduced, or where opt.reduced_grads() shows them"
    )
