"""NorMuon: Muon whose orthogonal updates are evened out row by row (neuron by neuron)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from freehold.rules.base import Check, Span, StateField
from freehold.rules.muon_family import MuonFamily
from freehold.rules.orthogonal import CHECKS, Piece, is_beta, rescaled_step

__all__ = ["NorMuon"]


@dataclass(frozen=True, slots=True)
class NorMuon(MuonFamily):
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
        nesterov: Whether to look ahead along the momentum.
        ns_coefficients: As in ``Muon``.
        eps: :math:`\epsilon`.
        ns_steps: As in ``Muon``.
        adjust_lr_fn: ``None`` or ``"match_rms_adamw"``, ``"original"`` or ``"spectral"``; see above.
        method: As in ``Muon``, and so are all that follow but the last.
        ns_dtype: See ``Muon``.
        max_batch_bytes: See ``Muon``.
        split: See ``Muon``.
        split_scale: See ``Muon``.
        lr_scale: See ``Muon``.
        cautious: See ``Muon``.
        beta2: :math:`\beta_2`.

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

    eps: float = 1e-8
    beta2: float = 0.95

    checks: ClassVar[tuple[Check, ...]] = (*CHECKS, ("beta2", is_beta, "beta2 should be in [0, 1) but is: {}"))

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """``momentum_buffer`` by element and ``row_second_moment`` by row, under any options."""
        return (StateField(name="momentum_buffer"), StateField(name="row_second_moment", per="row"))

    def step_along(self, piece: Piece, span: Span, options: Mapping[str, Any], lr: float | Tensor) -> None:
        """Step along the directions, evened out row by row; see ``MuonFamily.step_along``."""
        ortho = piece.ortho.to(span.param.dtype)  # (k, M, N)
        second = piece.rows_of(span.state["row_second_moment"])  # (k, M)
        second.lerp_(ortho.square().mean(-1), 1 - options["beta2"])
        evened = ortho / second.sqrt().add_(options["eps"]).unsqueeze(-1)
        rescaled_step(piece, ortho, evened, span, options, lr)
