"""Which params are managed, and which rule each of them gets.

[Note: Output heads]
A head is recognised without its name: what ``get_output_embeddings()`` returns, anything that shares its Parameter with
an embedding, and a ``Linear`` with as many outputs as an embedding has rows. The last test alone would misjudge small
models, in which that number is also a hidden width (a vocabulary of 256 and ``d_model`` 256): there every square
projection would pass for a head. So where the number is a width of the model too, only a Linear that stands
alone counts: one whose path, with layer numbers removed, no other candidate shares. If several are left, the one
defined last is taken, with a warning; and none is looked for where a head is known already (tied, named by the model,
or told by its size).
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from freehold.errors import PlanTypeError, RoutingError, UnsupportedError
from freehold.plan.spec import RuleKind

__all__ = ["Group", "NamedParam", "Route", "check_tensors", "named_params_of", "route"]


class Group:
    """Options, and if wanted the rule, for all params whose qualified name matches a pattern.

    The first group that matches a param takes it. A pattern that matches nothing is an error, so that a typing mistake
    cannot silently leave params at the defaults.

    Args:
        pattern: A glob as in ``fnmatch`` (``*``, ``?``, ``[...]``), matched against the whole qualified name, case
            included. ``*`` also matches dots.
        rule: ``"matrix"``, ``"elementwise"``, or ``None`` to leave the routing as it is.
        **options: Options of the param group, such as ``lr`` or ``weight_decay``; they must be options of the rule.

    Raises:
        RoutingError: An unknown rule.
        PlanTypeError: A pattern that is not a string.

    Example:
        >>> Group("*.bias", weight_decay=0.0)
        Group('*.bias', rule=None, weight_decay=0.0)
    """

    __slots__ = ("options", "pattern", "rule")

    def __init__(self, pattern: str, *, rule: RuleKind | None = None, **options: Any) -> None:
        if not isinstance(pattern, str) or not pattern:
            raise PlanTypeError(f"Group pattern must be a non-empty string, got {pattern!r}")
        if rule not in (None, "matrix", "elementwise"):
            raise RoutingError(f"Group({pattern!r}): rule must be 'matrix', 'elementwise' or None, got {rule!r}")
        self.pattern = pattern
        self.rule: RuleKind | None = rule
        self.options = options

    def matches(self, name: str) -> bool:
        """Whether this group's pattern covers the qualified name."""
        return fnmatch.fnmatchcase(name, self.pattern)

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"Group({self.pattern!r}, rule={self.rule!r}{options})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParam:
    """A managed Parameter, its qualified name, and the further names under which the model knows it (tied weights)."""

    name: str
    param: nn.Parameter
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What is to happen to one param.

    Attributes:
        named: The param.
        kind: The rule that updates it.
        group: Index of the ``Group`` that took it, or ``None``.
        planned_shape: The shape as the planner sees it: convolution weights as ``(out, rest)``, all others as they are.
        reason: Why it has this rule, for ``describe()``.
    """

    named: NamedParam
    kind: RuleKind
    group: int | None
    planned_shape: tuple[int, ...]
    reason: str


def named_params_of(
    model_or_named_params: object,
) -> tuple[nn.Module | None, list[NamedParam], list[NamedParam]]:
    """Split the constructor's first argument into the module (if it is one), the trainable and the frozen params.

    Args:
        model_or_named_params: An ``nn.Module``; or a mapping or an iterable of ``(name, Parameter)``, in model order.

    Raises:
        PlanTypeError: Anything else: bare params, a set, tensors that are no Parameters.
        RoutingError: A name or a Parameter given twice, or nothing to train.
    """
    if isinstance(model_or_named_params, nn.Module):
        module: nn.Module | None = model_or_named_params
        pairs = list(module.named_parameters(remove_duplicate=False))
        merged = _merge_tied(pairs)
    else:
        module = None
        merged = _checked_pairs(model_or_named_params)
    trainable = [named for named in merged if named.param.requires_grad]
    if not trainable:
        raise RoutingError("there is nothing to train: no param has requires_grad=True")
    return module, trainable, [named for named in merged if not named.param.requires_grad]


def _merge_tied(pairs: Iterable[tuple[str, nn.Parameter]]) -> list[NamedParam]:
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in pairs:
        params.setdefault(id(param), param)
        names.setdefault(id(param), []).append(name)
    return [NamedParam(name=names[key][0], param=param, aliases=tuple(names[key][1:])) for key, param in params.items()]


def _checked_pairs(given: object) -> list[NamedParam]:
    expected = "expected an nn.Module or model.named_parameters()"
    if isinstance(given, (set, frozenset)):
        raise PlanTypeError(f"{expected}, got a set: its order differs from rank to rank")
    if isinstance(given, Mapping):
        given = given.items()
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise PlanTypeError(f"{expected}, got {type(given).__name__}")
    result: list[NamedParam] = []
    for position, pair in enumerate(given):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            what = "bare params" if isinstance(pair, torch.Tensor) else f"{type(pair).__name__} at position {position}"
            raise PlanTypeError(f"{expected}, that is pairs (name, Parameter); got {what}. Names identify params")
        name, param = pair
        if not isinstance(param, nn.Parameter):
            raise PlanTypeError(f"param {name!r} must be an nn.Parameter, got {type(param).__name__}")
        result.append(NamedParam(name=name, param=param))
    _refuse_duplicates(result)
    return result


def _refuse_duplicates(named: list[NamedParam]) -> None:
    by_name: dict[str, int] = {}
    by_param: dict[int, list[str]] = {}
    for item in named:
        by_name[item.name] = by_name.get(item.name, 0) + 1
        by_param.setdefault(id(item.param), []).append(item.name)
    twice = [f"name {name!r} given {count} times" for name, count in by_name.items() if count > 1]
    twice += [f"one Parameter given as {' and '.join(map(repr, n))}" for n in by_param.values() if len(n) > 1]
    if twice:
        raise RoutingError("duplicate params: " + "; ".join(twice) + ". Give each Parameter once, under one name")


def check_tensors(named: Iterable[NamedParam]) -> None:
    """Refuse params that cannot be laid out: on meta, empty, complex, sparse, several devices.

    Raises:
        UnsupportedError: With every offending param and what is wrong with it.
    """
    problems: list[str] = []
    devices: dict[str, str] = {}
    for item in named:
        param = item.param
        if param.is_meta:
            problems.append(f"{item.name!r} is on the meta device and has no values; materialise it first")
        elif param.numel() == 0:
            problems.append(f"{item.name!r} has no elements (shape {tuple(param.shape)}): a placeholder, not a weight")
        elif not param.is_floating_point():
            problems.append(f"{item.name!r} is {param.dtype}; only real floating point is supported")
        elif param.layout is not torch.strided:
            problems.append(f"{item.name!r} has layout {param.layout}; only dense params are supported")
        devices.setdefault(str(param.device), item.name)
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        problems.append(f"all params must be on one device, got {where}")
    if problems:
        raise UnsupportedError("these params cannot be laid out: " + "; ".join(problems))


def route(module: nn.Module | None, named: list[NamedParam], groups: list[Group]) -> list[Route]:
    """Give every param its rule: by the first matching group, else by what it is.

    Args:
        module: The model, or ``None`` if only named params are known (then only shapes speak).
        named: The trainable params in model order.
        groups: The user's groups, first match wins.

    Raises:
        RoutingError: A group that takes no param, or a matrix rule for a vector; all such problems at once.
    """
    known = _known_kinds(module, named)
    taken = [0] * len(groups)
    problems: list[str] = []
    routes: list[Route] = []
    for item in named:
        group = _first_match(item, groups)
        shape, kind, reason = known[id(item.param)]
        if group is not None:
            taken[group] += 1
            wanted = groups[group].rule
            if wanted is not None:
                kind, reason = wanted, f"group {groups[group].pattern!r}"
        if kind == "matrix" and len(shape) < 2:
            problems.append(f"{item.name!r} of shape {tuple(item.param.shape)} is no matrix ({reason})")
        routes.append(Route(named=item, kind=kind, group=group, planned_shape=shape, reason=reason))
    problems += [
        f"{group!r} takes no param: its pattern matches none, or earlier groups took them all"
        for group, count in zip(groups, taken, strict=True)
        if not count
    ]
    if problems:
        raise RoutingError("routing failed: " + "; ".join(problems))
    return routes


def _first_match(item: NamedParam, groups: list[Group]) -> int | None:
    names = (item.name, *item.aliases)
    return next((i for i, group in enumerate(groups) if any(map(group.matches, names))), None)


def _known_kinds(module: nn.Module | None, named: list[NamedParam]) -> dict[int, tuple[tuple[int, ...], RuleKind, str]]:
    """Planner's shape, rule and reason of every param, by the Parameter's identity."""
    reasons = _elementwise_by_module(module) if module is not None else {}
    convolutions = _convolution_weights(module) if module is not None else set[int]()
    kinds: dict[int, tuple[tuple[int, ...], RuleKind, str]] = {}
    for item in named:
        shape = tuple(item.param.shape)
        if id(item.param) in reasons:
            kinds[id(item.param)] = (shape, "elementwise", reasons[id(item.param)])
        elif item.name.rpartition(".")[2].endswith("bias"):
            # Mixture-of-experts models stack the biases of their experts in one (E, n): still vectors, and no matrix.
            kinds[id(item.param)] = (shape, "elementwise", "bias")
        elif id(item.param) in convolutions:
            kinds[id(item.param)] = ((shape[0], item.param.numel() // shape[0]), "matrix", "convolution")
        else:
            kinds[id(item.param)] = (shape, *_kind_by_shape(shape))
    return kinds


def _kind_by_shape(shape: tuple[int, ...]) -> tuple[RuleKind, str]:
    if len(shape) < 2:
        return "elementwise", "vector" if shape else "scalar"
    if len(shape) > 2 and max(shape) == _product(shape):
        return "elementwise", "vector in the shape of a stack"
    return "matrix", {2: "matrix", 3: "stack of matrices"}.get(len(shape), "matrix (out, rest)")


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _convolution_weights(module: nn.Module) -> set[int]:
    from_convolutions = (m.weight for m in module.modules() if isinstance(m, nn.modules.conv._ConvNd))
    return {id(weight) for weight in from_convolutions if isinstance(weight, nn.Parameter)}


def _elementwise_by_module(module: nn.Module) -> dict[int, str]:
    """Params that are no matrices although they look like one: embeddings and heads, with the reason."""
    reasons: dict[int, str] = {}
    for name, embedding in _embeddings(module):
        reasons[id(embedding.weight)] = f"embedding {name!r}"
    head = _output_embeddings_of(module)
    if isinstance(head, nn.Module):
        for param in head.parameters(recurse=False):
            reasons.setdefault(id(param), "output head")
    for name, linear in _heads(module, reasons):
        reasons.setdefault(id(linear.weight), f"output head {name!r}")
    return reasons


def _output_embeddings_of(module: nn.Module) -> object:
    """What a Hugging Face model says its head is; ``None`` for models without that method, or without a head."""
    if "get_output_embeddings" not in dir(type(module)):
        return None
    try:
        return module.get_output_embeddings()  # pyright: ignore[reportCallIssue]  duck-typed, checked above
    except NotImplementedError:
        return None


def _embeddings(module: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            yield name, child


def _heads(module: nn.Module, known: dict[int, str]) -> list[tuple[str, nn.Linear]]:
    """The Linears that are output heads; see [Note: Output heads]. ``known`` holds what has a reason already."""
    linears = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    embeddings = [embedding for _, embedding in _embeddings(module)]
    widths = {linear.in_features for _, linear in linears} | {e.embedding_dim for e in embeddings}
    row_counts = sorted({embedding.num_embeddings for embedding in embeddings}, reverse=True)
    distinct = [rows for rows in row_counts if rows not in widths]
    heads = [(name, linear) for rows in distinct for name, linear in linears if linear.out_features == rows]
    if heads or any(id(linear.weight) in known for _, linear in linears):
        return heads
    for rows in row_counts:
        heads = _the_one_that_stands_alone([(n, m) for n, m in linears if m.out_features == rows], rows)
        if heads:
            break
    return heads


def _the_one_that_stands_alone(candidates: list[tuple[str, nn.Linear]], rows: int) -> list[tuple[str, nn.Linear]]:
    by_path: dict[str, list[tuple[str, nn.Linear]]] = {}
    for name, linear in candidates:
        by_path.setdefault(re.sub(r"\d+", "#", name), []).append((name, linear))
    alone = [group[0] for group in by_path.values() if len(group) == 1]
    if len(alone) > 1:
        names = ", ".join(repr(name) for name, _ in alone)
        warnings.warn(
            f"{rows} is both the row count of an embedding and a width of the model, so the output head cannot be told "
            f"from {names}; taking the last, {alone[-1][0]!r}. Name it with Group(..., rule='elementwise') to be sure",
            stacklevel=2,
        )
    return alone[-1:]
