"""AdamW: moments of the gradient, element by element, with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from freehold.plan.spec import RuleKind
from freehold.rules.base import Check, Rule, Span, StateField, check_options, host_scalar, is_nonnegative

__all__ = ["AdamW"]


@dataclass(frozen=True, slots=True)
class AdamW(Rule):
    r"""AdamW, as ``torch.optim.AdamW`` computes it.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        \theta_t &= (1 - \gamma \lambda)\, \theta_{t-1}
            - \frac{\gamma}{1 - \beta_1^t}\, m_t
            \Big/ \Big(\frac{\sqrt{v_t}}{\sqrt{1 - \beta_2^t}} + \epsilon\Big)

    On CPU the result has the bits of ``torch.optim.AdamW`` on params of the span's dtype, wherever params are
    cut or joined. There is neither ``amsgrad`` nor ``maximize``.

    Args:
        lr: Learning rate :math:`\gamma`, a float or a 1-element tensor.
        betas: :math:`(\beta_1, \beta_2)`.
        eps: :math:`\epsilon`.
        weight_decay: Decoupled weight decay :math:`\lambda`.
        lr_scale: A multiplier of ``lr`` that schedulers leave alone, for ``Group("head.*", lr_scale=0.5)``.

    Example:
        >>> import torch
        >>> rule = AdamW(lr=0.1, weight_decay=0.0)
        >>> state = {field.name: torch.zeros(64) for field in rule.state_fields()}
        >>> span = Span(param=torch.zeros(64), grad=torch.full((64,), 7.0), state=state, blocks=(), step=1)
        >>> rule.update(span, rule.defaults())
        >>> round(span.param[0].item(), 4)
        -0.1

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    lr_scale: float = 1.0

    kind: ClassVar[RuleKind] = "elementwise"

    def __post_init__(self) -> None:
        self.validate(self.defaults())

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """``exp_avg`` and ``exp_avg_sq``, under any options."""
        return (StateField(name="exp_avg"), StateField(name="exp_avg_sq"))

    def validate(self, options: Mapping[str, Any]) -> None:
        """Check a merged option set; see ``Rule.validate``."""
        check_options("AdamW", options, _CHECKS)

    @torch.no_grad()
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        """Update the elements of a span; see ``Rule.update``."""
        lr = host_scalar(options["lr"]) * options["lr_scale"]
        beta1, beta2 = options["betas"]
        weight_decay = options["weight_decay"]
        exp_avg, exp_avg_sq = span.state["exp_avg"], span.state["exp_avg_sq"]
        if weight_decay != 0:
            span.param.mul_(float(1 - lr * weight_decay))
        exp_avg.lerp_(span.grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(span.grad, span.grad, value=1 - beta2)
        step_size = float(lr / (1 - beta1**span.step))
        # The gradient has been used: its memory serves for the denominator.
        denominator = torch.sqrt(exp_avg_sq, out=span.grad)
        denominator.div_((1 - beta2**span.step) ** 0.5).add_(options["eps"])
        span.param.addcdiv_(exp_avg, denominator, value=-step_size)


def _is_beta_pair(value: Any) -> bool:
    return len(value) == 2 and all(type(beta) is float and 0.0 <= beta < 1.0 for beta in value)


_CHECKS: tuple[Check, ...] = (
    ("lr", is_nonnegative, "Invalid learning rate: {}"),
    ("betas", _is_beta_pair, "Invalid betas, expected two floats in [0, 1): {}"),
    ("eps", is_nonnegative, "Invalid epsilon value: {}"),
    ("weight_decay", is_nonnegative, "Invalid weight_decay value: {}"),
    ("lr_scale", is_nonnegative, "Invalid lr_scale value: {}"),
)
