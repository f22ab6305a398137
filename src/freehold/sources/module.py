"""A live ``nn.Module``, on any device, the meta device included."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from freehold.errors import SourceError
from freehold.plan.spec import ParamSpec
from freehold.sources.source import ModelSource

__all__ = ["from_module", "imported"]


def imported(module: str, *, extra: str) -> Any:
    """A module of an optional package.

    Raises:
        SourceError: It is not installed; names the extra that brings it.

    Example:
        >>> imported("json", extra="models").loads("[1]")
        [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        raise SourceError(f"this source needs {package}: pip install 'freehold[{extra}]' ({error})") from error


def from_module(module: object, *, name: str | None = None) -> ModelSource:
    """The trainable params of a module, with the rules that ``LayerwiseOptimizer`` would give them.

    Args:
        module: An ``nn.Module``.
        name: What to call the source; by default the class's name.

    Raises:
        PlanTypeError: It is no module.
        SourceError: PyTorch is not installed.
        RoutingError: It has nothing to train.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 16))
        >>> [(spec.name, spec.rule) for spec in from_module(model).params]
        [('0.weight', 'elementwise'), ('1.weight', 'matrix'), ('1.bias', 'elementwise')]
    """
    # The runtime's own routing, so that the two cannot disagree. It is asked for by name because it needs torch.
    routing = imported("freehold.runtime.routing", extra="torch")
    owner, trainable, frozen = routing.named_params_of(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        routes = routing.route(owner, trainable, [])
    notes = [f"{warning.message}." for warning in caught]
    if frozen:
        notes.append(f"{len(frozen)} frozen params are left out.")
    return ModelSource(
        name=name or type(module).__name__,
        params=tuple(spec for route in routes for spec in _specs(route)),
        notes=tuple(notes),
    )


def _specs(route: Any) -> list[ParamSpec]:
    """A param, and an entry for each further name that it has."""
    named = route.named
    dtype = str(named.param.dtype).removeprefix("torch.")
    first = ParamSpec(name=named.name, shape=route.planned_shape, dtype=dtype, rule=route.kind)
    tied = [
        ParamSpec(name=alias, shape=route.planned_shape, dtype=dtype, rule=route.kind, tied_to=named.name)
        for alias in named.aliases
    ]
    return [first, *tied]
