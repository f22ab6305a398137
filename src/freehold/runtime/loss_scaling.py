"""What ``freehold.GradScaler`` needs of the optimizer; see ``scaler.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch

from freehold.errors import LifecycleError, UnsupportedError
from freehold.runtime import norms
from freehold.runtime.faults import collective

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["LossScaling"]


class LossScaling:
    """The part of ``LayerwiseOptimizer`` that is about scaled losses."""

    _in_scaler = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if not self._in_scaler:  # torch.amp.GradScaler.step asks for this first; it unscales p.grad, a placeholder here
            raise UnsupportedError(
                "torch.amp.GradScaler cannot unscale gradients that are shared out over ranks; use "
                "freehold.GradScaler, or train in bfloat16, which needs no loss scaling"
            )
        return False

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        self._in_scaler = True
        try:
            yield
        finally:
            self._in_scaler = False

    @torch.no_grad()
    @collective
    def _unscale(self, factor: float) -> bool:
        whole = cast("LayerwiseOptimizer", self)
        whole._refuse_if_closed()
        early = "gradients cannot be unscaled with early_update=True: weights may have been updated with them"
        whole._settle("unscale_", LifecycleError(early) if whole._options.early_update else None)
        for bucket in whole._buckets:
            bucket.grads.own.mul_(factor)
        return norms.all_finite(whole._buckets, whole._comm)
