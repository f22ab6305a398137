"""A JSON list of names and shapes."""

from __future__ import annotations

from typing import cast

from freehold.errors import SourceError
from freehold.sources.routing import route_listed
from freehold.sources.source import ListedParam, ModelSource

__all__ = ["from_list"]


def from_list(entries: object, *, name: str, dtype: str = "bfloat16") -> ModelSource:
    """Params from ``[[name, shape], ...]`` in model order.

    Args:
        entries: What a JSON file holds.
        name: What to call the source.
        dtype: Element type of all of them.

    Raises:
        SourceError: An entry that is no pair, a shape that is none, a name that comes twice.

    Example:
        >>> from_list([["norm.weight", [64]], ["up.weight", [256, 64]]], name="toy").params[1].rule
        'matrix'
    """
    if not isinstance(entries, list):
        raise SourceError(f"{name}: expected a list [[name, shape], ...], got {entries!r:.80}")
    listed: list[ListedParam] = []
    for index, entry in enumerate(cast("list[object]", entries)):
        match entry:
            case [str(param), [*sizes]]:
                shape = cast("tuple[int, ...]", tuple(sizes))
                listed.append(ListedParam(name=param, shape=shape, dtype=dtype))
            case _:
                raise SourceError(f"{name}: entry {index} must be [name, [size, ...]], got {entry!r:.80}")
    try:
        params, notes = route_listed(listed)
    except SourceError as error:
        raise SourceError(f"{name}: {error}") from error
    return ModelSource(name=name, params=params, notes=notes)
