"""No weight is ever read stale, wherever it is read.

Forward pre-hooks wait for the weights of their own module. A weight may be read elsewhere as well: ``F.linear(x,
other.weight)``, a positional table sliced by its parent, an exponential moving average after the step, ``p.norm()`` for
a log. While gathers are in flight a ``TorchFunctionMode`` sees every torch function that takes one of our Parameters,
and waits for the bucket of that Parameter first. It costs about two microseconds per torch call, and only from a step
to the end of the gathers.

The mode is put at the *bottom* of the thread's mode stack, below any that the user has entered (``with
torch.device(...)`` is one), because those are left in LIFO order; it is taken out from wherever it then is. Only what
``torch.set_default_device`` entered stays below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from freehold.runtime.gatherer import WeightGatherer

__all__ = ["StaleReadGuard"]

# What looks at a Parameter but not at its values. Above all p.grad: zero_grad() right after step() sets it on every
# param, and would else wait for every gather.
_READS_NO_VALUES = frozenset(
    getattr(getattr(Tensor, name), access)
    for name in (
        "_version",
        "device",
        "dtype",
        "grad",
        "grad_fn",
        "is_leaf",
        "layout",
        "ndim",
        "requires_grad",
        "shape",
    )
    for access in ("__get__", "__set__", "__delete__")
) | {Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.requires_grad_, Tensor.size, Tensor.stride}


class StaleReadGuard(TorchFunctionMode):
    """Waits for a Parameter's bucket before any torch function reads the Parameter.

    Args:
        gatherer: Knows which buckets are in flight.
    """

    def __init__(self, gatherer: WeightGatherer) -> None:
        super().__init__()
        self._gatherer: WeightGatherer | None = gatherer

    def install(self) -> None:
        """Watch this thread, until ``remove``."""
        if not self.installed():
            _restack(lambda modes: _inserted(self, modes))

    def remove(self) -> None:
        """Stop watching this thread."""
        if self.installed():
            _restack(lambda modes: [mode for mode in modes if mode is not self])

    def remove_if_idle(self) -> None:
        """Stop watching this thread if no gather is in flight."""
        if self._gatherer is None or not self._gatherer.busy:
            self.remove()

    def retire(self) -> None:
        """Never watch again, and let go of the buffers.

        The garbage collector may call this from any thread and in the midst of any other guard's ``install``; a guard
        that it cannot take off the stack it is on does nothing there, and goes when that stack next changes.
        """
        self._gatherer = None
        self.remove()

    @property
    def retired(self) -> bool:
        """Whether it has been told never to watch again."""
        return self._gatherer is None

    def installed(self) -> bool:
        """Whether this thread is watched."""
        return any(mode is self for mode in _get_current_function_mode_stack())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        gatherer = self._gatherer
        if gatherer is not None and gatherer.busy and func not in _READS_NO_VALUES:
            _wait_for(gatherer, args)
            if kwargs:
                _wait_for(gatherer, tuple(kwargs.values()))
        return func(*args, **kwargs) if kwargs else func(*args)


def _wait_for(gatherer: WeightGatherer, values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, nn.Parameter):
            gatherer.wait_for_param(value)
        elif isinstance(value, (list, tuple)):
            _wait_for(gatherer, value)


def _inserted(guard: TorchFunctionMode, modes: list[TorchFunctionMode]) -> list[TorchFunctionMode]:
    # torch.set_default_device keeps its own mode at the very bottom, and fails if it is no longer there.
    default_device = vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context")
    bottom = 1 if modes and modes[0] is default_device else 0
    return [*modes[:bottom], guard, *modes[bottom:]]


def _restack(change: Callable[[list[TorchFunctionMode]], list[TorchFunctionMode]]) -> None:
    modes = change(_get_current_function_mode_stack())
    while torch._C._len_torch_function_stack():
        _pop_mode()
    for mode in modes:
        if not (isinstance(mode, StaleReadGuard) and mode.retired):
            _push_mode(mode)
