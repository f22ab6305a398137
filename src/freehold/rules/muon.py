"""Muon: momentum, orthogonalised matrix by matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from freehold.errors import RuleError
from freehold.plan.spec import RuleKind
from freehold.rules.base import (
    Block,
    Check,
    Rule,
    Span,
    StateField,
    check_options,
    host_scalar,
    is_nonnegative,
)
from freehold.rules.newton_schulz import COEFFICIENTS, EPS, NUM_STEPS, newton_schulz

__all__ = ["Muon"]

# Matrices of one shape go through Newton-Schulz together up to this many elements: enough to fill an
# accelerator, and bounded, since a batch needs about 10 bytes an element of temporary memory.
MAX_BATCH_NUMEL = 2**26

MATCH_RMS_FACTOR = 0.2  # RMS of an AdamW update; Liu et al., Muon is Scalable, https://arxiv.org/abs/2502.16982


@dataclass(frozen=True, slots=True)
class Muon(Rule):
    r"""Muon, as ``torch.optim.Muon`` computes it.

    .. math::
        B_t &= \mu B_{t-1} + (1 - \mu)\, g_t \\
        O_t &= \mathrm{NS}\big((1 - \mu)\, g_t + \mu B_t\big) \quad\text{or}\quad \mathrm{NS}(B_t)
            \quad\text{without nesterov} \\
        \theta_t &= (1 - \gamma \lambda)\, \theta_{t-1} - \gamma\, s(M, N)\, O_t

    On CPU the result has the bits of ``torch.optim.Muon`` on params of the span's dtype, except where
    ``newton_schulz`` deliberately differs: for matrices so small or large that torch's would lose them. A
    stack ``(E, M, N)`` is updated exactly as ``E`` separate params ``(M, N)``, with the learning rate scaled
    by ``(M, N)``; a fused weight, such as QKV in one, is one matrix. A convolution weight is given as its
    matrix ``(out, rest)``.

    Args:
        lr: Learning rate :math:`\gamma`, a float or a 1-element tensor.
        weight_decay: Decoupled weight decay :math:`\lambda`.
        momentum: :math:`\mu`.
        nesterov: Whether to look ahead along the momentum.
        ns_coefficients: ``(a, b, c)`` of Newton-Schulz.
        eps: As in ``newton_schulz``.
        ns_steps: Iterations of Newton-Schulz, below 100.
        adjust_lr_fn: :math:`s(M, N)`: ``"original"`` or ``None`` for ``sqrt(max(1, M / N))``,
            ``"match_rms_adamw"`` for ``0.2 * sqrt(max(M, N))``.
        method: How matrices are orthogonalised. ``"standard"`` is the only one so far.

    Example:
        >>> import torch
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
    """

    lr: float | Tensor = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS
    eps: float = EPS
    ns_steps: int = NUM_STEPS
    adjust_lr_fn: str | None = None
    method: str = "standard"

    kind: ClassVar[RuleKind] = "matrix"

    def __post_init__(self) -> None:
        self.validate(self.defaults())

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """``momentum_buffer``, under any options."""
        return (StateField(name="momentum_buffer"),)

    def validate(self, options: Mapping[str, Any]) -> None:
        """Check a merged option set; see ``Rule.validate``."""
        check_options("Muon", options, _CHECKS)

    @torch.no_grad()
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        """Update the matrices of a span; see ``Rule.update``."""
        lr = host_scalar(options["lr"])
        momentum, weight_decay = options["momentum"], options["weight_decay"]
        # Over the whole span, padding included: these are elementwise, and their bits do not depend on where
        # a matrix begins or ends.
        direction = span.state["momentum_buffer"].lerp_(span.grad, 1 - momentum)
        if options["nesterov"]:
            direction = span.grad.lerp_(direction, momentum)
        if weight_decay != 0:
            span.param.mul_(float(1 - lr * weight_decay))
        for batch in _batches(span.blocks):
            orthogonal = newton_schulz(
                batch.view(direction),
                coefficients=options["ns_coefficients"],
                num_steps=options["ns_steps"],
                eps=options["eps"],
            )
            ratio = _lr_ratio(options["adjust_lr_fn"], batch.num_rows, batch.num_cols)
            batch.view(span.param).add_(orthogonal, alpha=-float(lr * ratio))


def _lr_ratio(adjust_lr_fn: str | None, num_rows: int, num_cols: int) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return MATCH_RMS_FACTOR * math.sqrt(max(num_rows, num_cols))
    return math.sqrt(max(1, num_rows / num_cols))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Matrices of one shape at equal distances, which one strided view can show."""

    offset: int
    num_matrices: int
    stride: int
    num_rows: int
    num_cols: int

    def view(self, flat: Tensor) -> Tensor:
        """``(n,)`` -> ``(num_matrices, num_rows, num_cols)``, sharing memory."""
        size = (self.num_matrices, self.num_rows, self.num_cols)
        return flat.as_strided(size, (self.stride, self.num_cols, 1), flat.storage_offset() + self.offset)


@lru_cache(maxsize=4096)  # the blocks of a span are the same at every step
def _batches(blocks: tuple[Block, ...]) -> tuple[_Batch, ...]:
    """Cut the matrices of a span into batches, in order."""
    batches: list[_Batch] = []
    for offset, num_rows, num_cols in _matrices(blocks):
        last = batches[-1] if batches else None
        numel = num_rows * num_cols
        if last is not None and (last.num_rows, last.num_cols) == (num_rows, num_cols):
            stride = last.stride if last.num_matrices > 1 else offset - last.offset
            is_next = offset == last.offset + last.num_matrices * stride
            if is_next and (last.num_matrices + 1) * numel <= MAX_BATCH_NUMEL:
                batches[-1] = replace(last, num_matrices=last.num_matrices + 1, stride=stride)
                continue
        batches.append(_Batch(offset=offset, num_matrices=1, stride=numel, num_rows=num_rows, num_cols=num_cols))
    return tuple(batches)


def _matrices(blocks: tuple[Block, ...]) -> Iterator[tuple[int, int, int]]:
    """``(offset, M, N)`` of every matrix."""
    for block in blocks:
        if len(block.shape) not in (2, 3):
            raise RuleError(f"Muon updates matrices (M, N) and stacks (E, M, N), got a block of shape {block.shape}")
        num_matrices = 1 if len(block.shape) == 2 else block.shape[0]
        num_rows, num_cols = block.shape[-2:]
        for index in range(num_matrices):
            yield block.offset + index * num_rows * num_cols, num_rows, num_cols


def _is_step_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 100


_CHECKS: tuple[Check, ...] = (
    ("lr", is_nonnegative, "Learning rate should be >= 0 but is: {}"),
    ("momentum", is_nonnegative, "momentum should be >= 0 but is: {}"),
    ("weight_decay", is_nonnegative, "weight decay should be >= 0 but is: {}"),
    ("nesterov", lambda value: isinstance(value, bool), "nesterov should be a bool but is: {}"),
    (
        "ns_coefficients",
        lambda value: len(value) == 3,
        "Coefficients must be a tuple of exactly 3 values but are: {}",
    ),
    ("eps", is_nonnegative, "eps should be >= 0 but is: {}"),
    ("ns_steps", _is_step_count, "Number of steps must be an int from 0 to 99 but is: {}"),
    (
        "adjust_lr_fn",
        lambda value: value in (None, "original", "match_rms_adamw"),
        "Adjust learning rate function {} is not supported; choose 'original', 'match_rms_adamw' or None",
    ),
    (
        "method",
        lambda value: value == "standard",
        "Newton-Schulz method {} is not supported; the only one so far is 'standard'",
    ),
)
