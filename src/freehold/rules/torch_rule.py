"""Any ``torch.optim.Optimizer`` that updates one matrix at a time, as a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from freehold.errors import RuleError
from freehold.plan.spec import RuleKind
from freehold.rules.base import Rule, Span, StateField
from freehold.rules.matrices import batches
from freehold.rules.nested import flatten, unflatten

__all__ = ["TorchRule"]

_GROUP = "group:"  # prefix of what an optimizer keeps in its param group rather than in a param's state


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TorchRule(Rule):
    """Runs a ``torch.optim.Optimizer`` on the owned matrices: ``torch.optim.Muon``, SOAP, Shampoo.

    At every step an optimizer is made for the matrices of a span (slices of stacks count as matrices), given their
    state of the last step, stepped once, and its state is kept. So it must hold all that it remembers in
    ``optimizer.state`` or ``optimizer.param_groups``, as tensors, numbers, bools, ``None``, and lists, tuples and
    dicts of these; must treat its params independently of each other; and must need neither a closure nor a graph. It
    sees float32 masters (float64 for float64 params), and gradients that are averaged and clipped.

    The options of the rule are the optimizer's ``defaults``, as far as they are numbers, bools, strings, ``None``,
    tuples of these or 1-element tensors; groups and schedulers may edit them.

    Args:
        optimizer_class: The optimizer's class; its constructor takes params first.
        **kwargs: Its other arguments.

    Raises:
        RuleError: Something that is no optimizer class, or arguments that it refuses.

    Example:
        >>> import torch
        >>> from freehold import LayerwiseOptimizer
        >>> model = torch.nn.Linear(8, 4, bias=False)
        >>> rule = TorchRule(torch.optim.Muon, lr=0.1, weight_decay=0.0)
        >>> opt = LayerwiseOptimizer(model, matrix=rule, elementwise=None)
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> opt.step()
        >>> opt.param_groups[0]["lr"]
        0.1
    """

    optimizer_class: type[torch.optim.Optimizer]
    kwargs: dict[str, Any]

    kind: ClassVar[RuleKind] = "matrix"
    keeps_objects: ClassVar[bool] = True

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        object.__setattr__(self, "optimizer_class", optimizer_class)
        object.__setattr__(self, "kwargs", kwargs)
        given = cast("object", optimizer_class)
        if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
            raise RuleError(f"TorchRule takes a subclass of torch.optim.Optimizer, got {given!r}")
        self.defaults()

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.kwargs.items())
        return f"TorchRule({self.optimizer_class.__name__}{options})"

    def defaults(self) -> dict[str, Any]:
        """The optimizer's own defaults, as far as a param group can show them."""
        return {name: value for name, value in self._made(_example(), {}).defaults.items() if _is_plain(value)}

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """None: all state is in ``Span.per_matrix``."""
        return ()

    def validate(self, options: Mapping[str, Any]) -> None:
        """Check a merged option set by what the optimizer's constructor says to it; see ``Rule.validate``."""
        defaults = self.defaults()
        missing = sorted(set(defaults) - set(options))
        if missing:
            raise RuleError(f"{self!r}: options {missing} are missing")
        edited = {name: options[name] for name in defaults if options[name] is not defaults[name]}
        self._made(_example(), edited)

    @torch.no_grad()
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        """Update the matrices of a span; see ``Rule.update``."""
        params = _matrices(span)
        if not params:
            return
        optimizer = self._made(params, {})
        group = optimizer.param_groups[0]
        names = set(group) - {"params"}
        group.update({name: options[name] for name in self.defaults()})
        _restore(optimizer, params, span.per_matrix)
        optimizer.step()
        _keep(optimizer, params, span.per_matrix, names)

    def _made(self, params: list[Tensor], options: Mapping[str, Any]) -> torch.optim.Optimizer:
        make = cast("Any", self.optimizer_class)
        try:
            return make(params, **{**self.kwargs, **options})
        except (TypeError, ValueError, AssertionError) as error:
            raise RuleError(f"{self.optimizer_class.__name__}({self.kwargs | dict(options)}): {error}") from error


def _example() -> list[Tensor]:
    return [torch.nn.Parameter(torch.zeros(2, 2))]


def _matrices(span: Span) -> list[Tensor]:
    """Every matrix ``(M, N)`` of the span as a view, with its gradient in ``grad``."""
    params: list[Tensor] = []
    for batch in batches(span.blocks):
        pairs = zip(batch.view(span.param.detach()), batch.view(span.grad), strict=True)
        for param, grad in pairs:
            param.grad = grad
            params.append(param)
    return params


def _restore(optimizer: torch.optim.Optimizer, params: list[Tensor], kept: tuple[dict[str, Any], ...]) -> None:
    for param, state in zip(params, kept, strict=True):
        own = unflatten({name: value for name, value in state.items() if not name.startswith(_GROUP)})
        if own:
            optimizer.state[param] = own
    in_group = {n.removeprefix(_GROUP): value for n, value in kept[0].items() if n.startswith(_GROUP)}
    optimizer.param_groups[0].update(unflatten(in_group))


def _keep(
    optimizer: torch.optim.Optimizer, params: list[Tensor], kept: tuple[dict[str, Any], ...], names: set[str]
) -> None:
    """Take the state out of the optimizer; what is in its group and was not there at first goes to every matrix."""
    group = optimizer.param_groups[0]
    added = {name: value for name, value in group.items() if name not in names and name != "params"}
    in_group = {_GROUP + name: value for name, value in flatten(added).items()}
    for param, state in zip(params, kept, strict=True):
        state.clear()
        state.update(flatten(optimizer.state.get(param, {})))
        state.update(in_group)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in cast("tuple[Any, ...]", value))
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, Tensor) and value.numel() == 1)
    )
