"""Loss scaling for float16: ``torch.amp.GradScaler`` that unscales where the averaged gradients are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a ``LayerwiseOptimizer``; for any other optimizer it does what torch's does.

    torch's own unscales ``p.grad``, which here is a placeholder. This one reduces the window, unscales the averaged
    gradients on their owners, and lets the group decide whether any of them is inf or NaN. So ``unscale_`` (and
    ``step``, which calls it) is collective; all ranks skip the same steps and arrive at the same scale. Use is as in
    torch: ``scale(loss).backward()``, optionally ``unscale_(opt)`` and ``opt.clip_grad_norm_``, then ``step(opt)`` and
    ``update()``. ``update`` is told of the group's decision, so that it needs no communication of its own.

    Example:
        >>> import torch, freehold
        >>> model = torch.nn.Linear(8, 8)
        >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
        >>> scaler = freehold.GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        >>> scaler.step(opt)
        >>> scaler.update()
        >>> opt.close()
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, unless that was done, and call ``optimizer.step`` unless a gradient holds inf or NaN."""
        if not isinstance(optimizer, LayerwiseOptimizer):
            return super().step(optimizer, *args, **kwargs)
        with optimizer._scaled():
            return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch.amp.GradScaler calls this to unscale the gradients of one optimizer; sharded scalers override it too.
        if not isinstance(optimizer, LayerwiseOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not optimizer._unscale(float(inv_scale)):
            found_inf.fill_(1.0)
        return {found_inf.device: found_inf}
