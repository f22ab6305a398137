"""Nested state as a flat dict of tensors and numbers, which a checkpoint can hold, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from freehold.errors import RuleError

__all__ = ["flatten", "unflatten"]

# What stands behind a path for values that are no tensors or numbers; a value True is stored there.
_NONE = "/?none"
_EMPTY = {list: "/?list", tuple: "/?tuple", dict: "/?dict"}


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """Lists, tuples and dicts inside become paths: ``"GG/l0"``, ``"GG/t0"``, ``"GG/dname"``.

    Raises:
        RuleError: Anything but tensors, numbers, bools, ``None`` and such containers of them; names and keys that are
            no strings, or have a ``/``.

    Example:
        >>> flatten({"step": 3, "Q": [1.0, None]})
        {'step': 3, 'Q/l0': 1.0, 'Q/l1/?none': True}
        >>> unflatten(flatten({"step": 3, "Q": [1.0, (), None]}))
        {'step': 3, 'Q': [1.0, (), None]}
    """
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if not _is_name(name):
            raise RuleError(
                f"optimizer state has a name {name!r}: it must be a string without '/'; rename it in the optimizer"
            )
        _put(flat, name, value)
    return flat


def _put(flat: dict[str, Any], path: str, value: Any) -> None:
    if isinstance(value, (Tensor, int, float)):
        flat[path] = value
    elif value is None:
        flat[path + _NONE] = True
    elif type(value) in _EMPTY:
        parts = _parts(value)
        if not parts:
            flat[path + _EMPTY[type(value)]] = True
        for name, part in parts.items():
            _put(flat, f"{path}/{name}", part)
    else:
        raise RuleError(
            f"optimizer state {path!r} is a {type(value).__name__}; only tensors, numbers, bools, None, and lists, "
            "tuples and dicts of them can be kept from step to step and saved"
        )


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and "/" not in key


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        if not all(map(_is_name, items)):
            raise RuleError(f"optimizer state has a dict with keys {list(items)}; they must be strings without '/'")
        return {f"d{key}": part for key, part in items.items()}
    letter = "l" if isinstance(value, list) else "t"
    return {f"{letter}{index}": part for index, part in enumerate(cast("Sequence[Any]", value))}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flatten``."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *heads, last = path.split("/")
        node = tree
        for head in heads:
            node = node.setdefault(head, {})
        node[last] = value
    return {name: _value(node) for name, node in tree.items()}


def _value(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = cast("dict[str, Any]", node)
    first = next(iter(children))
    if first.startswith("?"):
        return _empty(first)
    if first[0] == "d":
        return {name[1:]: _value(child) for name, child in children.items()}
    items = [_value(children[f"{first[0]}{index}"]) for index in range(len(children))]
    return items if first[0] == "l" else tuple(items)


def _empty(mark: str) -> Any:
    empty: dict[str, Any] = {"?none": None, "?list": [], "?tuple": (), "?dict": {}}
    return empty[mark]
