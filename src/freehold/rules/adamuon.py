"""AdaMuon: Muon with a second moment of the orthogonal updates, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from freehold.rules.base import Check, Span, StateField
from freehold.rules.muon_family import MuonFamily
from freehold.rules.orthogonal import CHECKS, Piece, is_beta, is_bool, momentum_direction, rescaled_step

__all__ = ["AdaMuon"]


@dataclass(frozen=True, slots=True)
class AdaMuon(MuonFamily):
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
        nesterov: Whether to look ahead along the momentum.
        ns_coefficients: As in ``Muon``.
        eps: :math:`\epsilon`.
        ns_steps: As in ``Muon``.
        adjust_lr_fn: As in ``NorMuon``.
        method: As in ``Muon``, and so are all that follow but the last two.
        ns_dtype: See ``Muon``.
        max_batch_bytes: See ``Muon``.
        split: See ``Muon``.
        split_scale: See ``Muon``.
        lr_scale: See ``Muon``.
        cautious: See ``Muon``.
        beta2: :math:`\beta_2`.
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

    nesterov: bool = False
    eps: float = 1e-8
    beta2: float = 0.95
    sign: bool = True

    checks: ClassVar[tuple[Check, ...]] = (
        *CHECKS,
        ("beta2", is_beta, "beta2 should be in [0, 1) but is: {}"),
        ("sign", is_bool, "sign should be a bool but is: {}"),
    )

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """``momentum_buffer`` and ``second_moment``, under any options."""
        return (StateField(name="momentum_buffer"), StateField(name="second_moment"))

    def direction(self, span: Span, options: Mapping[str, Any]) -> Tensor:
        """The momentum, or its signs; see ``MuonFamily.direction``."""
        direction = momentum_direction(span, options)
        return torch.sign(direction, out=span.grad) if options["sign"] else direction

    def step_along(self, piece: Piece, span: Span, options: Mapping[str, Any], lr: float | Tensor) -> None:
        """Step along the directions, evened out element by element; see ``MuonFamily.step_along``."""
        ortho = piece.ortho.to(span.param.dtype)  # (k, M, N)
        second = piece.of(span.state["second_moment"])  # (k, M, N)
        second.lerp_(ortho.square(), 1 - options["beta2"])
        evened = ortho / second.sqrt().add_(options["eps"])
        rescaled_step(piece, ortho, evened, span, options, lr)
