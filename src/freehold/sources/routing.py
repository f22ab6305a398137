"""Rules for params of which only names and shapes are known.

[Note: Routing without a module]
The runtime looks at modules and needs no names. A list has no modules, so here names stand in for them; everything else
is the same. In this order:

1. Fewer than two dimensions, or all but one of several sizes equal to 1: elementwise (norms, scalars, gates).
2. A name that ends in ``bias``: elementwise, also where the biases of experts are stacked.
3. Two dimensions, in a module whose name has the word ``embed``, ``embedding(s)``, ``emb``, ``wte`` or ``wpe``
   (``embed_tokens``, ``word_embeddings``, ``embed_out``), or is ``shared`` or ``relative_attention_bias`` (T5): an
   embedding, elementwise.
4. Two dimensions, in a module called ``lm_head``, ``output_layer`` or ``unembed``, or with as many rows as an
   embedding: an output head, elementwise. Where that number is also a width of the model, only a param that stands
   alone counts, as in the runtime's [Note: Output heads].
5. Four dimensions and more, and three where the module's name has the word ``conv`` or the last size is below 8:
   a convolution, one matrix ``(out, rest)``.
6. Three dimensions: a stack of matrices, one for each expert.
7. Two dimensions: a matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from freehold.errors import FreeholdError, SourceError
from freehold.plan.spec import ParamSpec
from freehold.sources.source import ListedParam

__all__ = ["route_listed"]

_EMBEDDING = re.compile(
    r"(?:^|_)(?:embed|embeds|embedding|embeddings|emb|wte|wpe)(?:_|$)|^(?:shared|relative_attention_bias)$"
)
_HEAD = re.compile(r"^(?:lm_head|output_layer|unembed)$")
_CONVOLUTION = re.compile(r"(?:^|_)conv(?:\d*d?)(?:_|$)")

_SHORTEST_ROW = 8
"""A 3-D param with shorter rows is a Conv1d weight ``(out, in, kernel)``: no expert is as narrow as this."""

_MAX_PROBLEMS = 5
"""Of a list with many faults, this many are told."""


def route_listed(listed: Iterable[ListedParam]) -> tuple[tuple[ParamSpec, ...], tuple[str, ...]]:
    """Give every param its rule; see [Note: Routing without a module].

    Args:
        listed: The params in model order.

    Returns:
        The params for the planner, and notes on what had to be guessed.

    Raises:
        SourceError: A shape that is none, a name that comes twice; all such faults at once.

    Example:
        >>> listed = [
        ...     ListedParam(name="wte.weight", shape=(100, 8)),
        ...     ListedParam(name="mlp.weight", shape=(32, 8)),
        ...     ListedParam(name="head.weight", shape=(100, 8)),
        ... ]
        >>> [spec.rule for spec in route_listed(listed)[0]]
        ['elementwise', 'matrix', 'elementwise']
    """
    params = list(listed)
    _refuse_faults(params)
    embeddings = [param for param in params if len(param.shape) == 2 and _EMBEDDING.search(_module_of(param.name))]
    heads, notes = _heads(params, embeddings)
    elementwise = {param.name for param in embeddings} | heads
    return tuple(_routed(param, elementwise) for param in params), notes


def _refuse_faults(params: Sequence[ListedParam]) -> None:
    problems: list[str] = []
    seen: set[str] = set()
    for param in params:
        if param.name in seen:
            problems.append(f"param {param.name!r} is listed twice")
        seen.add(param.name)
        try:
            ParamSpec(name=param.name, shape=param.shape, dtype=param.dtype, rule="elementwise")
        except FreeholdError as error:
            problems.append(str(error))
    if not params:
        problems.append("the list of params is empty")
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise SourceError("; ".join(shown))


def _module_of(name: str) -> str:
    """The last word of the module's path: the name without ``.weight``."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] == "weight" else parts[-1]


def _routed(param: ListedParam, elementwise: set[str]) -> ParamSpec:
    shape = param.shape
    is_vector = len(shape) < 2 or (len(shape) > 2 and max(shape) == math.prod(shape))
    if is_vector or param.name in elementwise or param.name.endswith("bias"):
        return ParamSpec(name=param.name, shape=shape, dtype=param.dtype, rule="elementwise")
    if len(shape) > 3 or (len(shape) == 3 and _is_convolution(param)):
        shape = (shape[0], math.prod(shape[1:]))
    return ParamSpec(name=param.name, shape=shape, dtype=param.dtype, rule="matrix")


def _is_convolution(param: ListedParam) -> bool:
    return param.shape[-1] < _SHORTEST_ROW or bool(_CONVOLUTION.search(_module_of(param.name)))


def _heads(params: Sequence[ListedParam], embeddings: Sequence[ListedParam]) -> tuple[set[str], tuple[str, ...]]:
    """Names of the output heads, and a note where one had to be guessed."""
    known = {param.name for param in embeddings}
    linears = [
        param
        for param in params
        if len(param.shape) == 2 and param.name not in known and not param.name.endswith("bias")
    ]
    named = {param.name for param in linears if _HEAD.search(_module_of(param.name))}
    widths = {param.shape[1] for param in [*linears, *embeddings]}
    row_counts = sorted({param.shape[0] for param in embeddings}, reverse=True)
    distinct = {rows for rows in row_counts if rows not in widths}
    heads = named | {param.name for param in linears if param.shape[0] in distinct}
    if heads:
        return heads, ()
    for rows in row_counts:
        alone = _standing_alone([param.name for param in linears if param.shape[0] == rows])
        if alone:
            return {alone[-1]}, _ambiguity(rows, alone)
    return set(), ()


def _standing_alone(names: Iterable[str]) -> list[str]:
    """Names whose path, with layer numbers removed, no other one has."""
    by_path: dict[str, list[str]] = {}
    for name in names:
        by_path.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return [group[0] for group in by_path.values() if len(group) == 1]


def _ambiguity(rows: int, alone: list[str]) -> tuple[str, ...]:
    if len(alone) == 1:
        return ()
    return (
        f"{rows} is both the row count of an embedding and a width of the model; of {', '.join(alone)} "
        f"the last is taken for the output head.",
    )
