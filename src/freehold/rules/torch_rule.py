"""Any ``torch.optim.Optimizer`` that updates one matrix at a time, as a rule."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
_SCHEDULED = ("lr", "weight_decay")  # what schedulers and users edit at any time, and so no optimizer may


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TorchRule(Rule):
    """Runs a ``torch.optim.Optimizer`` on the owned matrices: ``torch.optim.Muon``, SOAP, Shampoo.

    At every step an optimizer is made for the matrices of a span (slices of stacks count as matrices), given their
    state of the last step, stepped once, and its state is kept. So it must hold all that it remembers in
    ``optimizer.state`` or ``optimizer.param_groups``, as tensors, numbers, bools, ``None``, and lists, tuples and
    dicts of these; must treat its params independently of each other; and must need neither a closure nor a graph. It
    sees float32 masters (float64 for float64 params), and gradients that are averaged and clipped.

    The options of the rule are the optimizer's ``defaults``, as far as they are numbers, bools, strings, ``None``,
    tuples of these or 1-element tensors; groups and schedulers may edit them. An option in which the optimizer itself
    counts (``k``, ``weight_sum`` and ``lr_max`` of schedule-free ones) is an option for the first step only: the
    optimizer's own value is then kept with the state of each matrix, in checkpoints too, and edits no longer matter.

    Args:
        optimizer_class: The optimizer's class; its constructor takes params first.
        **kwargs: Its other arguments.

    Raises:
        RuleError: Something that is no optimizer class, or arguments that it refuses. In a step: state of other types,
            or an optimizer that changes its own ``lr`` or ``weight_decay``, which schedulers and users edit.

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

    @property
    def label(self) -> str:
        """``"TorchRule(Muon)"``: the rule and its optimizer; see ``Rule.label``."""
        return f"TorchRule({self.optimizer_class.__name__})"

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
        options_now = {name: options[name] for name in self.defaults()}
        given = {name: value for name, value in (group | options_now).items() if name != "params"}
        group.update({name: _copied(value) for name, value in given.items()})
        _restore(optimizer, params, span.per_matrix)
        optimizer.step()
        _keep(optimizer, params, span.per_matrix, given)

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
    optimizer: torch.optim.Optimizer, params: list[Tensor], kept: tuple[dict[str, Any], ...], given: dict[str, Any]
) -> None:
    """Take the state out of the optimizer; what is in its group, and not as it was given, goes to every matrix."""
    group = optimizer.param_groups[0]
    own = {n: v for n, v in group.items() if n != "params" and not (n in given and _is_same(v, given[n]))}
    for name in _SCHEDULED:
        if name in own and name in given:
            raise RuleError(
                f"{type(optimizer).__name__} changes its option {name!r} in step(), from {given[name]} to {own[name]}; "
                f"TorchRule keeps {name!r} for schedulers and users to edit: choose an optimizer, or arguments for it, "
                "that leave it alone, and use a scheduler"
            )
    in_group = {_GROUP + name: value for name, value in flatten(own).items()}
    of_params = [flatten(optimizer.state.get(param, {})) for param in params]
    for own_state, state in zip(of_params, kept, strict=True):
        state.clear()
        state.update(own_state)
        # Copies, for an optimizer may count in a tensor, and the next step may be of some of these matrices alone.
        state.update({name: _copied(value) for name, value in in_group.items()})


def _copied(value: Any) -> Any:
    """What an optimizer may change in place without changing the original."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(cast("Any", value)) if isinstance(value, (list, dict)) else value


def _is_same(value: Any, given: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(given, Tensor):
        return isinstance(value, Tensor) and isinstance(given, Tensor) and _is_same_tensor(value, given)
    if type(value) is not type(given):
        return False
    if isinstance(value, (list, tuple)):
        items, others = cast("Sequence[Any]", value), cast("Sequence[Any]", given)
        return len(items) == len(others) and all(map(_is_same, items, others))
    if isinstance(value, dict):
        ours, theirs = cast("dict[Any, Any]", value), cast("dict[Any, Any]", given)
        return ours.keys() == theirs.keys() and all(_is_same(ours[key], theirs[key]) for key in ours)
    return value is given or bool(value == given)


def _is_same_tensor(value: Tensor, given: Tensor) -> bool:
    return value.dtype == given.dtype and value.device == given.device and torch.equal(value, given)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in cast("tuple[Any, ...]", value))
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, Tensor) and value.numel() == 1)
    )
