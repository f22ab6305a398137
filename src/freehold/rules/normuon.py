"""NorMuon: Muon whose orthogonal updates are evened out row by row (neuron by neuron)."""

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
    momentum_direction,
    orthogonal_pieces,
    rescaled_step,
)
from freehold.rules.polar.coefficients import Coefficients
from freehold.rules.polar.variants import MAX_BATCH_BYTES

__all__ = ["NorMuon"]


@dataclass(frozen=True, slots=True)
class NorMuon(Rule):
    r"""NorMuon: the rows of each orthogonal update are divided by their running root mean square.

    .. math::
        B_t &= \mu B_{t-1} + (1 - \mu)\, g_t, \qquad O_t = \mathrm{NS}(B_t) \quad\text{(or its Nesterov form)} \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, \mathrm{mean}_{\text{cols}}(O_t^2) \qquad (M,) \\
        \hat O_t &= O_t / (\sqrt{v_t} + \epsilon) \\
        \theta_t &= (1 - \gamma \lambda)\, \theta_{t-1} - \gamma\, \eta_t\, \hat O_t

    By default :math:`\eta_t = 0.2 \sqrt{MN} / \lVert \hat O_t \rVert_F`: every update has the RMS of one of AdamW, as
    in the paper. With ``adjust_lr_fn`` ``"original"`` or ``"spectral"``,
    :math:`\eta_t = s(M, N) \lVert O_t \rVert_F / \lVert \hat O_t \rVert_F`: the norm of Muon's own update.
    A zero update stays zero. Nesterov's form is the default, as in Muon; the paper's algorithm is without.

    Args:
        lr: Learning rate :math:`\gamma`, a float or a 1-element tensor.
        weight_decay: Decoupled weight decay :math:`\lambda`.
        momentum: :math:`\mu`.
        beta2: :math:`\beta_2`.
        nesterov: Whether to look ahead along the momentum.
        ns_coefficients: As in ``Muon``.
        eps: :math:`\epsilon`.
        ns_steps: As in ``Muon``.
        adjust_lr_fn: ``None`` or ``"match_rms_adamw"``, ``"original"`` or ``"spectral"``; see above.
        method: As in ``Muon``, and so are all that follow.
        ns_dtype: See ``Muon``.
        max_batch_bytes: See ``Muon``.
        split: See ``Muon``.
        split_scale: See ``Muon``.
        lr_scale: See ``Muon``.
        cautious: See ``Muon``.

    Example:
        >>> import torch
        >>> from freehold.rules import Block, Span
        >>> rule = NorMuon(lr=0.1, weight_decay=0.0)
        >>> state = {"momentum_buffer": torch.zeros(64), "row_second_moment": torch.zeros(8)}
        >>> grad = torch.diag(torch.arange(1.0, 9.0)).flatten()
        >>> span = Span(param=torch.zeros(64), grad=grad, state=state, blocks=(Block(offset=0, shape=(8, 8)),), step=1)
        >>> rule.update(span, rule.defaults())
        >>> rows = span.param.view(8, 8).square().mean(1).sqrt()  # RMS 0.2, times lr
        >>> torch.allclose(rows, torch.full((8,), 0.02), rtol=1e-2)
        True

    References:
        Li et al., NorMuon: Making Muon more efficient and scalable, https://arxiv.org/abs/2510.05491
    """

    lr: float | Tensor = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    beta2: float = 0.95
    nesterov: bool = True
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

    kind: ClassVar[RuleKind] = "matrix"

    def __post_init__(self) -> None:
        self.validate(self.defaults())

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """``momentum_buffer`` by element and ``row_second_moment`` by row, under any options."""
        return (StateField(name="momentum_buffer"), StateField(name="row_second_moment", per="row"))

    def validate(self, options: Mapping[str, Any]) -> None:
        """Check a merged option set; see ``Rule.validate``."""
        check_options("NorMuon", options, _CHECKS)

    def check_param(self, name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> None:
        """Check ``split`` against a param; see ``Rule.check_param``."""
        check_split("NorMuon", name, shape, options)

    @torch.no_grad()
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        """Update the matrices of a span; see ``Rule.update``."""
        lr = effective_lr(options)
        direction = momentum_direction(span, options)
        decay(span, options, lr)
        for piece in orthogonal_pieces(span, direction, options):
            ortho = piece.ortho.to(span.param.dtype)  # (k, M, N)
            second = piece.rows_of(span.state["row_second_moment"])  # (k, M)
            second.lerp_(ortho.square().mean(-1), 1 - options["beta2"])
            evened = ortho / second.sqrt().add_(options["eps"]).unsqueeze(-1)
            rescaled_step(piece, ortho, evened, span, options, lr)


_CHECKS: tuple[Check, ...] = (*CHECKS, ("beta2", is_beta, "beta2 should be in [0, 1) but is: {}"))
