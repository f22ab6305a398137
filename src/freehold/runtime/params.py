"""A managed param at run time: where it lies in its bucket, and the small record of its gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from freehold.plan import Slot
from freehold.runtime.marker import make_marker

__all__ = ["ManagedParam"]


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class ManagedParam:
    """One param under management.

    [Note: Gradient markers]
    Once a gradient has moved into its bucket, ``p.grad`` is a NaN scalar expanded to the param's shape. It takes no
    memory; a reader sees NaN instead of a stale local gradient, and arithmetic in place raises. It also tells a window
    that goes on (the marker is untouched) from gradients that the user threw away (``p.grad`` is None, or ``zero_()``
    moved the marker's version), whichever ``zero_grad`` he called.

    Attributes:
        index: Position in model order.
        name: Qualified name.
        param: The user's Parameter; its data is a view of the bucket's weights.
        group: Index of its param group.
        bucket: Index of its bucket.
        slots: Its pieces, by address.
        matrix_shape: ``(M, N)`` of the matrices it consists of, or ``None`` for elements.
        grad_dtype: The reduction dtype.
        grad_view: Its part of the bucket's gradients, in the param's shape and the reduction dtype; ``None`` while the
            bucket has no memory for them, see [Note: Gradient memory].
        filled: ``grad_view`` holds gradient that has not been launched yet.
        waits: ``p.grad`` itself holds that gradient, because the bucket has no memory yet.
        arrived: A gradient arrived in this window and was not thrown away.
        in_pass: A gradient arrived in the current pass.
        adds: The gradient that autograd is about to deliver adds to what ``grad_view`` holds.
        version: The Parameter's version after our own last write; any other says that the user wrote.
        num_steps: Updates so far; equal on all ranks.
    """

    index: int
    name: str
    param: nn.Parameter
    group: int
    bucket: int
    slots: tuple[Slot, ...]
    matrix_shape: tuple[int, int] | None
    grad_dtype: torch.dtype
    grad_view: Tensor | None = None
    filled: bool = False
    waits: bool = False
    arrived: bool = False
    in_pass: bool = False
    adds: bool = False
    version: int = 0
    num_steps: int = 0
    _marker: Tensor = field(init=False)
    _nan: Tensor = field(init=False)
    _marker_version: int = field(init=False)

    def __post_init__(self) -> None:
        self._renew_marker()

    @property
    def viewable(self) -> bool:
        """Whether ``p.grad`` may be the bucket's own memory: only where the reduction dtype is the param's."""
        return self.grad_dtype == self.param.dtype

    def mark(self) -> None:
        """Let ``p.grad`` say that the gradient is in the bucket."""
        like = (self._nan.dtype, self._nan.device) == (self.param.dtype, self.param.device)
        if self._nan._version != self._marker_version or not like:  # not like: model.to(...), refused at step
            self._renew_marker()
        self.param.grad = self._marker

    def marked(self) -> bool:
        """Whether ``p.grad`` is the marker as it was set."""
        return self.param.grad is self._marker and self._nan._version == self._marker_version

    def unmark(self) -> None:
        """Take the marker away, zeroed or not: autograd would add to it in place, which an expanded tensor refuses."""
        if self.param.grad is self._marker:
            self.param.grad = None

    def foreign_grad(self) -> Tensor | None:
        """``p.grad`` if the user put a tensor of his own there."""
        grad = self.param.grad
        return None if grad is None or grad is self.grad_view or grad is self._marker else grad

    def thrown_away(self) -> bool:
        """Whether the user discarded this window's gradient, in either of the two ways of ``zero_grad``."""
        grad = self.param.grad
        return grad is None or (grad is self._marker and self._nan._version != self._marker_version)

    def _renew_marker(self) -> None:
        self._marker, self._nan = make_marker(self.param)
        self._marker_version = self._nan._version
