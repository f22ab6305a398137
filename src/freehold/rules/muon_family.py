"""What Muon, NorMuon and AdaMuon share: their options, the checks of these, and the order of an update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from freehold.plan.spec import RuleKind
from freehold.rules.base import Check, Rule, Span, check_options
from freehold.rules.matrices import Split, check_split
from freehold.rules.newton_schulz import COEFFICIENTS, EPS, NUM_STEPS
from freehold.rules.orthogonal import CHECKS, Piece, decay, effective_lr, momentum_direction, orthogonal_pieces
from freehold.rules.polar.coefficients import Coefficients
from freehold.rules.polar.variants import MAX_BATCH_BYTES

__all__ = ["MuonFamily"]


@dataclass(frozen=True, slots=True)
class MuonFamily(Rule):
    """A rule that steps along orthogonalised momentum.

    To add one: subclass as ``Rule`` says; declare options of its own, and again those whose defaults differ; extend
    ``checks`` by its own; declare ``state_fields``, of which one is ``momentum_buffer``; write ``step_along``, and
    ``direction`` if it is not the momentum that is orthogonalised.

    Args:
        lr: As in ``Muon``, and so are all that follow.
        weight_decay: See ``Muon``.
        momentum: See ``Muon``.
        nesterov: See ``Muon``.
        ns_coefficients: See ``Muon``.
        eps: See ``Muon``.
        ns_steps: See ``Muon``.
        adjust_lr_fn: See ``Muon``.
        method: See ``Muon``.
        ns_dtype: See ``Muon``.
        max_batch_bytes: See ``Muon``.
        split: See ``Muon``.
        split_scale: See ``Muon``.
        lr_scale: See ``Muon``.
        cautious: See ``Muon``.

    Attributes:
        checks: What must hold for each option.

    Example:
        >>> from freehold.rules import AdaMuon, Muon
        >>> isinstance(Muon(), MuonFamily), isinstance(AdaMuon(), MuonFamily)
        (True, True)
        >>> sorted(AdaMuon().defaults().keys() - Muon().defaults().keys())
        ['beta2', 'sign']
    """

    lr: float | Tensor = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Coefficients = COEFFICIENTS
    eps: float = EPS
    ns_steps: int = NUM_STEPS
    adjust_lr_fn: str | None = None
    method: str = "standard"
    ns_dtype: str | None = None
    max_batch_bytes: int = MAX_BATCH_BYTES
    split: Split = None
    split_scale: tuple[float, ...] | None = None
    lr_scale: float = 1.0
    cautious: bool = False

    kind: ClassVar[RuleKind] = "matrix"
    checks: ClassVar[tuple[Check, ...]] = CHECKS

    def __post_init__(self) -> None:
        self.validate(self.defaults())

    def validate(self, options: Mapping[str, Any]) -> None:
        """Check a merged option set; see ``Rule.validate``."""
        check_options(self.label, options, self.checks)

    def check_param(self, name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> None:
        """Check ``split`` against a param; see ``Rule.check_param``."""
        check_split(self.label, name, shape, options)

    @torch.no_grad()
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        """Update the matrices of a span; see ``Rule.update``."""
        lr = effective_lr(options)
        direction = self.direction(span, options)
        decay(span, options, lr)
        for piece in orthogonal_pieces(span, direction, options):
            self.step_along(piece, span, options, lr)

    def direction(self, span: Span, options: Mapping[str, Any]) -> Tensor:
        """Advance the momentum and return ``(n,)``, of the span's dtype, to be orthogonalised matrix by matrix.

        It is ``span.grad``, overwritten, or a tensor of state, which then stays as it is.
        """
        return momentum_direction(span, options)

    @abstractmethod
    def step_along(self, piece: Piece, span: Span, options: Mapping[str, Any], lr: float | Tensor) -> None:
        """Update the params of some matrices of the span.

        Args:
            piece: The matrices and their orthogonal directions ``(k, M, N)``, in the compute dtype.
            span: The run of params, decayed.
            options: Those of the rule.
            lr: The learning rate, ``lr_scale`` included.
        """
