"""What is hung onto the user's Parameters and modules; each hook body is one call.

Hooks hold the runtime weakly, so a model does not keep a dropped optimizer alive, and a copied or pickled model gets
hooks that do nothing: a copy must never start a collective.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from freehold.runtime.gatherer import WeightGatherer
from freehold.runtime.guard import StaleReadGuard
from freehold.runtime.params import ManagedParam
from freehold.runtime.reducer import GradientReducer

__all__ = ["HookSet", "is_compiled"]


class _CopySafeHook:
    """A module hook that acts for the one module it was made for, and is inert in copies and pickles.

    Dynamo must not look into ``__call__``: it would take what it sees while tracing for what is always so. A model that
    is compiled after wrapping is therefore cut into graphs at the modules that own params.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def serves(self, module: nn.Module) -> bool:
        return self._module() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> _CopySafeHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_InertHook, ())


class _InertHook:
    def __call__(self, *args: Any) -> None:
        return None


class _WaitForWeights(_CopySafeHook):
    """Forward pre-hook of a module that owns params: wait for the buckets that hold them."""

    def __init__(self, module: nn.Module, gatherer: WeightGatherer, buckets: tuple[int, ...]) -> None:
        super().__init__(module)
        self._gatherer = weakref.ref(gatherer)
        self._buckets = buckets

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: Any) -> None:
        gatherer = self._gatherer()
        if gatherer is not None and gatherer.busy and self.serves(module):
            gatherer.wait(self._buckets)


class _WaitForAll(_CopySafeHook):
    """State-dict pre-hook of the model: every weight is current from here on."""

    def __init__(self, module: nn.Module, gatherer: WeightGatherer) -> None:
        super().__init__(module)
        self._gatherer = weakref.ref(gatherer)

    @_disable_dynamo
    def __call__(self, module: nn.Module, *args: Any) -> None:
        gatherer = self._gatherer()
        if gatherer is not None and self.serves(module):
            gatherer.wait_all()


class _AfterForward(_CopySafeHook):
    """Forward hook of the model: stop guarding reads if all weights are in; learn when a backward begins."""

    def __init__(self, module: nn.Module, reducer: GradientReducer, guard: StaleReadGuard) -> None:
        super().__init__(module)
        self._reducer = weakref.ref(reducer)
        self._guard = weakref.ref(guard)

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        guard = self._guard()
        if guard is not None and self.serves(module):
            guard.remove_if_idle()
        if torch.is_grad_enabled() and self.serves(module):
            watch = _BackwardBegins(self._reducer)
            for tensor in _tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:  # on a leaf it would stay, and pile up
                    tensor.register_hook(watch)


class _BackwardBegins:
    def __init__(self, reducer: weakref.ref[GradientReducer]) -> None:
        self._reducer = reducer

    def __call__(self, grad: Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.watch_backward()


class _BeforeAccumulate:
    """Pre-hook of the node that adds to ``p.grad``. A tensor hook would see ``autograd.grad``, which adds nothing."""

    def __init__(self, reducer: GradientReducer, param: ManagedParam) -> None:
        self._reducer = weakref.ref(reducer)
        self._param = weakref.ref(param)

    def __call__(self, grad: Any) -> None:
        reducer, param = self._reducer(), self._param()
        if reducer is not None and param is not None:
            reducer.before_accumulate(param)


class _AfterAccumulate(_BeforeAccumulate):
    """Post-accumulate hook of a Parameter."""

    def __call__(self, grad: Any) -> None:
        reducer, param = self._reducer(), self._param()
        if reducer is not None and param is not None:
            reducer.after_accumulate(param)


class HookSet:
    """All hooks of one optimizer, to be removed together.

    Args:
        module: The model, or ``None`` if only its params are known.
        params: The managed params.
        reducer: Told of gradients.
        gatherer: Asked for weights.
        guard: Watches for reads that no hook sees.
    """

    def __init__(
        self,
        module: nn.Module | None,
        params: list[ManagedParam],
        reducer: GradientReducer,
        gatherer: WeightGatherer,
        guard: StaleReadGuard,
    ) -> None:
        self._handles: list[Any] = []
        self._accumulators = [_accumulator(p.param) for p in params]  # their Parameters know them weakly only
        for p, accumulator in zip(params, self._accumulators, strict=True):
            self._handles.append(accumulator.register_prehook(_BeforeAccumulate(reducer, p)))
            self._handles.append(p.param.register_post_accumulate_grad_hook(_AfterAccumulate(reducer, p)))
        if module is not None:
            self._hook_reads(module, params, gatherer)
            self._handles.append(module.register_forward_hook(_AfterForward(module, reducer, guard)))

    def _hook_reads(self, module: nn.Module, params: list[ManagedParam], gatherer: WeightGatherer) -> None:
        bucket_of = {id(p.param): p.bucket for p in params}
        for child in module.modules():
            buckets = {bucket_of[id(q)] for q in child.parameters(recurse=False) if id(q) in bucket_of}
            if buckets:
                hook = _WaitForWeights(child, gatherer, tuple(sorted(buckets, reverse=True)))
                self._handles.append(child.register_forward_pre_hook(hook, prepend=True))
        self._handles.append(module.register_state_dict_pre_hook(_WaitForAll(module, gatherer)))

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._accumulators = [], []


def _accumulator(param: nn.Parameter) -> Any:
    """The autograd node that adds to ``p.grad``."""
    with torch.enable_grad():
        function = param.expand_as(param).grad_fn
    assert function is not None, "a managed param requires grad"
    return function.next_functions[0][0]


def is_compiled(module: nn.Module) -> bool:
    """Whether any part of the model runs as compiled or scripted code, which reads weights out of our sight."""
    return any(
        isinstance(child, torch.jit.ScriptModule)
        or child._compiled_call_impl is not None
        or "OptimizedModule" in (base.__name__ for base in type(child).__mro__)
        for child in module.modules()
    )


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a model returned: nested tuples, lists, mappings and dataclasses alike."""
    if isinstance(output, Tensor):
        yield output
        return
    children: Any = ()
    if isinstance(output, dict):
        children = output.values()
    elif isinstance(output, (tuple, list)):
        children = output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        children = [getattr(output, field.name) for field in dataclasses.fields(output)]  # __slots__ too
    for child in children:
        yield from _tensors(child)
