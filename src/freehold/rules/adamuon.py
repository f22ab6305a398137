"""AdaMuon: Muon with a second moment of the orthogonal updates, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from freehold.plan.spec import RuleKind
from freehold.rules.base import Check, Rule, Span, StateField, check_options
from freehold.rules.matrices import Split, check_split
from freehold.rules.newton_schulz import COEFFICIENTS, NUM_STEPS
from freehold.rules.orthogonal import (
    CHECKS,
    decay,
    effective_lr,
    is_beta,
    is_bool,
    momentum_direction,
    orthogonal_pieces,
    rescaled_step,
)
from freehold.rules.polar.coefficients import Coefficients
from freehold.rules.polar.variants import MAX_BATCH_BYTES

__all__ = ["AdaMuon"]


@dataclass(frozen=True, slots=True)
class AdaMuon(Rule):
    r"""AdaMuon: orthogonal updates of the momentum's signs, divided by their running root mean square.

    .. math::
        B_t &= \mu B_{t-1} + (1 - \mu)\, g_t, \qquad O_t = \mathrm{NS}(\mathrm{sign}(B_t)) \\
        V_t &= \beta_2 V_{t-1} + (1 - \beta_2)\, O_t^2, \qquad \hat O_t = O_t / (\sqrt{V_t} + \epsilon) \\
        \theta_t &= (1 - \gamma \lambda)\, \theta_{t-1} - \gamma\, \eta_t\, \hat O_t

    with :math:`\eta_t` as in ``NorMuon``, by default :math:`0.2 \sqrt{MN} / \lVert \hat O_t \rVert_F`. The paper's
    :math:`\beta_2` is its :math:`\mu`, and it has no Nesterov form; both are the defaults here.

    Args:
        lr: Learning rate :math:`\gamma`, a float or a 1-element tensor.
        weight_decay: Decoupled weight decay :math:`\lambda`.
        momentum: :math:`\mu`.
        beta2: :math:`\beta_2`.
        nesterov: Whether to look ahead along the momentum.
        ns_coefficients: As in ``Muon``.
        eps: :math:`\epsilon`.
        ns_steps: As in ``Muon``.
        adjust_lr_fn: As in ``NorMuon``.
        method: As in ``Muon``, and so are all that follow but the last.
        ns_dtype: See ``Muon``.
        max_batch_bytes: See ``Muon``.
        split: See ``Muon``.
        split_scale: See ``Muon``.
        lr_scale: See ``Muon``.
        cautious: See ``Muon``.
        sign: Whether to take signs of the momentum before it is orthogonalised.

    Example:
        >>> import torch
        >>> from freehold.rules import Block, Span
        >>> rule = AdaMuon(lr=0.1, weight_decay=0.0)
        >>> state = {field.name: torch.zeros(64) for field in rule.state_fields()}
        >>> grad = torch.randn(64, generator=torch.Generator().manual_seed(0))
        >>> span = Span(param=torch.zeros(64), grad=grad, state=state, blocks=(Block(offset=0, shape=(8, 8)),), step=1)
        >>> rule.update(span, rule.defaults())
        >>> round(span.param.square().mean().sqrt().item(), 5)  # RMS 0.2, times lr
        0.02

    References:
        Si, Zhang and Shen, AdaMuon: Adaptive Muon Optimizer, https://arxiv.org/abs/2507.11005 (version 2)
    """

    lr: float | Tensor = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    beta2: float = 0.95
    nesterov: bool = False
    ns_coefficients: Coefficients = COEFFICIENTS
    eps: float = 1e-8
    ns_steps: int = NUM_STEPS
    adjust_lr_fn: str | None = None
    method: str = "standard"
    ns_dtype: str | None = None
    max_batch_bytes: int = MAX_BATCH_BYTES
    split: Split = None
    split_scale: tuple[float, ...] | None = None
    lr_scale: float = 1.0
    cautious: bool = False
    sign: bool = True

    kind: ClassVar[RuleKind] = "matrix"

    def __post_init__(self) -> None:
        self.validate(self.defaults())

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """``momentum_buffer`` and ``second_moment``, under any options."""
        return (StateField(name="momentum_buffer"), StateField(name="second_moment"))

    def validate(self, options: Mapping[str, Any]) -> None:
        """Check a merged option set; see ``Rule.validate``."""
        check_options("AdaMuon", options, _CHECKS)

    def check_param(self, name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> None:
        """Check ``split`` against a param; see ``Rule.check_param``."""
        check_split("AdaMuon", name, shape, options)

    @torch.no_grad()
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        """Update the matrices of a span; see ``Rule.update``."""
        lr = effective_lr(options)
        direction = momentum_direction(span, options)
        if options["sign"]:
            direction = torch.sign(direction, out=span.grad)
        decay(span, options, lr)
        for piece in orthogonal_pieces(span, direction, options):
            ortho = piece.ortho.to(span.param.dtype)  # (k, M, N)
            second = piece.of(span.state["second_moment"])  # (k, M, N)
            second.lerp_(ortho.square(), 1 - options["beta2"])
            evened = ortho / second.sqrt().add_(options["eps"])
            rescaled_step(piece, ortho, evened, span, options, lr)


_CHECKS: tuple[Check, ...] = (
    *CHECKS,
    ("beta2", is_beta, "beta2 should be in [0, 1) but is: {}"),
    ("sign", is_bool, "sign should be a bool but is: {}"),
)
