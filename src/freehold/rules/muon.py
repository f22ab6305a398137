"""Muon: momentum, orthogonalised matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freehold.rules.base import Span, StateField
from freehold.rules.muon_family import MuonFamily
from freehold.rules.orthogonal import Piece, descend, lr_ratio

__all__ = ["Muon"]


@dataclass(frozen=True, slots=True)
class Muon(MuonFamily):
    r"""Muon, as ``torch.optim.Muon`` computes it.

    .. math::
        B_t &= \mu B_{t-1} + (1 - \mu)\, g_t \\
        O_t &= \mathrm{NS}\big((1 - \mu)\, g_t + \mu B_t\big) \quad\text{or}\quad \mathrm{NS}(B_t)
            \quad\text{without nesterov} \\
        \theta_t &= (1 - \gamma \lambda)\, \theta_{t-1} - \gamma\, s(M, N)\, O_t

    On CPU the result has the bits of ``torch.optim.Muon`` on params of the span's dtype, except where
    ``newton_schulz`` deliberately differs: for matrices so small or large that torch's would lose them. A
    stack ``(E, M, N)`` is updated exactly as ``E`` separate params ``(M, N)``, with the learning rate scaled
    by ``(M, N)``; a fused weight, such as QKV in one, is one matrix unless ``split`` says otherwise. A convolution
    weight is given as its matrix ``(out, rest)``.

    Args:
        lr: Learning rate :math:`\gamma`, a float or a 1-element tensor.
        weight_decay: Decoupled weight decay :math:`\lambda`.
        momentum: :math:`\mu`.
        nesterov: Whether to look ahead along the momentum.
        ns_coefficients: ``(a, b, c)`` of Newton-Schulz; such a triple for each step; or the name of a set:
            ``"jordan"``, ``"polar_express"`` or ``"exact"`` (see ``newton_schulz``).
        eps: As in ``newton_schulz``.
        ns_steps: Iterations of Newton-Schulz, below 100.
        adjust_lr_fn: :math:`s(M, N)`: ``"original"`` or ``None`` for ``sqrt(max(1, M / N))``,
            ``"match_rms_adamw"`` for ``0.2 * sqrt(max(M, N))``, ``"spectral"`` for ``sqrt(M / N)``.
        method: How matrices are orthogonalised: ``"standard"`` with the bits of torch; ``"gram"``; or ``"auto"``, the
            fastest by measurement. See ``newton_schulz`` and ``docs/newton_schulz.md``. With ``"auto"`` the last bits
            may differ between machines and runs; ranks still agree, for each matrix is updated by its owner alone.
        ns_dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``, in which Newton-Schulz computes;
            ``None`` for bfloat16, or the fastest with ``"auto"``. Params and state keep theirs.
        max_batch_bytes: So many bytes of matrices, in that dtype, are batched at most; work memory is bounded by 10
            times this, or by what one matrix needs.
        split: Cut each matrix by rows, and treat each part as a param of its own: a number of equal parts
            (``2`` for gate and up, the number of heads), or the rows of each (``(q, k, v)``). For fused weights, by
            ``Group("*.qkv.weight", split=(512, 128, 128))``.
        split_scale: A factor for the update of each part, such as ``(1.0, 1.0, 0.5)``.
        lr_scale: A multiplier of ``lr`` that schedulers leave alone, for ``Group("*.wo.weight", lr_scale=0.5)``.
        cautious: Decay weights only where that points the same way as the update (Cautious Weight Decay).

    Example:
        >>> import torch
        >>> from freehold.rules import Block, Span
        >>> rule = Muon(lr=0.02, weight_decay=0.0)
        >>> state = {field.name: torch.zeros(64) for field in rule.state_fields()}
        >>> span = Span(
        ...     param=torch.zeros(64), grad=torch.eye(8).flatten(), state=state,
        ...     blocks=(Block(offset=0, shape=(8, 8)),), step=1,
        ... )
        >>> rule.update(span, rule.defaults())
        >>> 0.6 < -span.param[0].item() / 0.02 < 1.3
        True

    References:
        Jordan et al., Muon: An optimizer for hidden layers, https://kellerjordan.github.io/posts/muon/
        Chen et al., Cautious Weight Decay, https://arxiv.org/abs/2510.12402
    """

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """``momentum_buffer``, under any options."""
        return (StateField(name="momentum_buffer"),)

    def step_along(self, piece: Piece, span: Span, options: Mapping[str, Any], lr: float | Tensor) -> None:
        """Step along the orthogonal directions as they are; see ``MuonFamily.step_along``."""
        batch = piece.batch
        ratio = lr_ratio(options["adjust_lr_fn"], batch.num_rows, batch.num_cols) * batch.scale
        descend(piece.of(span.param), piece.ortho, options, lr=lr, step_size=float(lr * ratio))
