"""What the rules of the Muon family share: momentum, orthogonal directions piece by piece, and the step along them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freehold.rules.base import Check, Span, host_scalar, is_nonnegative
from freehold.rules.matrices import Batch, batches, is_split, is_split_scale
from freehold.rules.polar.coefficients import is_coefficients, schedule_of
from freehold.rules.polar.products import Workspace
from freehold.rules.polar.select import METHODS, select_variant
from freehold.rules.polar.variants import DTYPE_NAMES, pieces

__all__ = [
    "CHECKS",
    "Piece",
    "decay",
    "descend",
    "effective_lr",
    "is_beta",
    "is_bool",
    "lr_ratio",
    "momentum_direction",
    "orthogonal_pieces",
    "rescaled_step",
]

MATCH_RMS_FACTOR = 0.2  # RMS of an AdamW update; Liu et al., Muon is Scalable, https://arxiv.org/abs/2502.16982


def effective_lr(options: Mapping[str, Any]) -> float | Tensor:
    """``lr`` times ``lr_scale``, for arithmetic on the host."""
    return host_scalar(options["lr"]) * options["lr_scale"]


def lr_ratio(adjust_lr_fn: str | None, num_rows: int, num_cols: int) -> float:
    """``s(M, N)``, by which a matrix's learning rate is scaled.

    ``"original"`` and ``None``: Jordan's, as in ``torch.optim.Muon``. ``"match_rms_adamw"``: Liu et al., as above.
    ``"spectral"``: updates of equal size in the norm of maps between RMS-normed vectors, Bernstein, Deriving Muon,
    https://jeremybernste.in/writing/deriving-muon.

    Example:
        >>> [lr_ratio(mode, 16, 64) for mode in ("original", "match_rms_adamw", "spectral")]
        [1.0, 1.6, 0.5]
    """
    if adjust_lr_fn == "match_rms_adamw":
        return MATCH_RMS_FACTOR * math.sqrt(max(num_rows, num_cols))
    if adjust_lr_fn == "spectral":
        return math.sqrt(num_rows / num_cols)
    return math.sqrt(max(1, num_rows / num_cols))


def momentum_direction(span: Span, options: Mapping[str, Any]) -> Tensor:
    """Advance ``momentum_buffer`` and return the direction ``(n,)``: ``span.grad``, overwritten, or the buffer itself.

    Over the whole span, padding included: this is elementwise, and its bits do not depend on where a matrix begins.
    """
    momentum = options["momentum"]
    direction = span.state["momentum_buffer"].lerp_(span.grad, 1 - momentum)
    return span.grad.lerp_(direction, momentum) if options["nesterov"] else direction


def decay(span: Span, options: Mapping[str, Any], lr: float | Tensor) -> None:
    """Decoupled weight decay of the whole span, unless it is cautious: then ``descend`` does it."""
    if options["weight_decay"] != 0 and not options["cautious"]:
        span.param.mul_(float(1 - lr * options["weight_decay"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some matrices of a batch and their orthogonal directions.

    Attributes:
        batch: The batch.
        start: The first matrix.
        stop: Past the last.
        ortho: ``(stop - start, M, N)`` contiguous, in the compute dtype; gone once the next piece is asked for.
    """

    batch: Batch
    start: int
    stop: int
    ortho: Tensor

    def of(self, flat: Tensor) -> Tensor:
        """This piece's matrices in a flat tensor of the span."""
        return self.batch.view(flat)[self.start : self.stop]

    def rows_of(self, by_row: Tensor) -> Tensor:
        """``(stop - start, M)``: this piece's rows in state by rows."""
        return self.batch.rows(by_row)[self.start : self.stop]


def orthogonal_pieces(span: Span, direction: Tensor, options: Mapping[str, Any]) -> Iterator[Piece]:
    """Orthogonalise the direction ``(n,)`` of every matrix of a span, in order."""
    schedule = schedule_of(options["ns_coefficients"], options["ns_steps"])
    dtype = None if options["ns_dtype"] is None else DTYPE_NAMES[options["ns_dtype"]]
    work = Workspace()
    for batch in batches(span.blocks, options["split"], options["split_scale"]):
        matrices = batch.view(direction)
        variant = select_variant(options["method"], dtype, matrices, schedule)
        for start, stop, ortho in pieces(matrices, variant, schedule, work, max_batch_bytes=options["max_batch_bytes"]):
            # Adding a transposed tensor of another dtype is four times slower than making it contiguous before.
            yield Piece(batch=batch, start=start, stop=stop, ortho=ortho.contiguous())


def descend(
    target: Tensor, update: Tensor, options: Mapping[str, Any], *, lr: float | Tensor, step_size: float
) -> None:
    """``target -= step_size * update``, after cautious weight decay if that is on.

    Cautious decay is applied only where it points the same way as the update: Chen et al., Cautious Weight Decay,
    https://arxiv.org/abs/2510.12402.

    Args:
        target: ``(k, M, N)`` the params.
        update: ``(k, M, N)``, any floating dtype.
        options: Those of the rule.
        lr: The learning rate, for decay.
        step_size: The learning rate, scaled.
    """
    if options["cautious"] and options["weight_decay"] != 0:
        agrees = (update * target) >= 0
        target.addcmul_(target, agrees.to(target.dtype), value=-float(lr * options["weight_decay"]))
    target.add_(update, alpha=-step_size)


def rescaled_step(
    piece: Piece, ortho: Tensor, evened: Tensor, span: Span, options: Mapping[str, Any], lr: float | Tensor
) -> None:
    """Step along an evened update ``(k, M, N)``, each matrix of it scaled to the norm that ``adjust_lr_fn`` asks for.

    ``None`` and ``"match_rms_adamw"``: an RMS of 0.2. Else: the norm of the orthogonal update, times ``s(M, N)``. The
    evened tensor is overwritten.
    """
    batch, mode = piece.batch, options["adjust_lr_fn"]
    norm = _norms(evened).clamp_(min=1e-20)  # only a zero update has a norm below this, and stays zero
    if mode in (None, "match_rms_adamw"):
        factor = MATCH_RMS_FACTOR * math.sqrt(batch.num_rows * batch.num_cols) / norm
    else:
        factor = lr_ratio(mode, batch.num_rows, batch.num_cols) * _norms(ortho) / norm
    descend(piece.of(span.param), evened.mul_(factor), options, lr=lr, step_size=float(lr * batch.scale))


def _norms(matrices: Tensor) -> Tensor:
    """``(k, M, N)`` -> ``(k, 1, 1)``."""
    return matrices.square().sum(dim=(-2, -1), keepdim=True).sqrt_()


def is_beta(value: Any) -> bool:
    """Whether a value is a decay rate of a moment."""
    return type(value) is float and 0.0 <= value < 1.0


def is_step_count(value: Any) -> bool:
    """Whether a value is a number of iterations."""
    return type(value) is int and 0 <= value < 100


def is_bool(value: Any) -> bool:
    """Whether a value is a bool."""
    return isinstance(value, bool)


_ADJUST = (None, "original", "match_rms_adamw", "spectral")

CHECKS: tuple[Check, ...] = (
    ("lr", is_nonnegative, "Learning rate should be >= 0 but is: {}"),
    ("momentum", is_nonnegative, "momentum should be >= 0 but is: {}"),
    ("weight_decay", is_nonnegative, "weight decay should be >= 0 but is: {}"),
    ("nesterov", is_bool, "nesterov should be a bool but is: {}"),
    (
        "ns_coefficients",
        is_coefficients,
        "Coefficients must be a tuple of exactly 3 values, a tuple of such tuples, or 'jordan', 'polar_express' or "
        "'exact', but are: {}",
    ),
    ("eps", is_nonnegative, "eps should be >= 0 but is: {}"),
    ("ns_steps", is_step_count, "Number of steps must be an int from 0 to 99 but is: {}"),
    (
        "adjust_lr_fn",
        lambda value: value in _ADJUST,
        "Adjust learning rate function {} is not supported; choose 'original', 'match_rms_adamw', 'spectral' or None",
    ),
    (
        "method",
        lambda value: value in METHODS,
        "Newton-Schulz method {} is not supported; choose 'standard', 'gram' or 'auto'",
    ),
    (
        "ns_dtype",
        lambda value: value is None or value in DTYPE_NAMES,
        "ns_dtype should be None, 'bfloat16', 'float16', 'float32' or 'float64' but is: {}",
    ),
    (
        "max_batch_bytes",
        lambda value: type(value) is int and value >= 1,
        "max_batch_bytes should be an int of at least 1 but is: {}",
    ),
    ("split", is_split, "split should be None, a number of parts, or a tuple of row counts but is: {}"),
    ("split_scale", is_split_scale, "split_scale should be None or a tuple of factors >= 0 but is: {}"),
    ("lr_scale", is_nonnegative, "lr_scale should be >= 0 but is: {}"),
    ("cautious", is_bool, "cautious should be a bool but is: {}"),
)
