"""Plain Python values as JSON and back, tensors set aside: what ``extra`` may hold, and options, and scheduler states.

No value can name a class or a function, so reading one back runs no code. Floats keep their bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freehold.errors import CheckpointError
from freehold.runtime.checkpoint.dtypes import DTYPE_NAMES

__all__ = ["decode", "encode"]


def encode(value: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    """A value in JSON's terms, its tensors put into ``tensors`` under keys that begin with ``prefix``.

    Args:
        value: ``None``, bools, ints, floats, strings, bytes, tensors, numpy arrays, and lists, tuples, sets and dicts
            of these, dicts with any such keys.
        tensors: Filled.
        prefix: What the keys begin with.

    Raises:
        CheckpointError: Anything else, naming where it stands.

    Example:
        >>> found = {}
        >>> encode({"step": 3, "lrs": (0.5, float("inf"))}, found, "extra")
        {'step': 3, 'lrs': {'$tuple': [0.5, {'$float': 'inf'}]}}
        >>> encode([torch.ones(2)], found, "extra"), list(found)
        ([{'$tensor': 'extra.0'}], ['extra.0'])
    """
    return _encode(value, tensors, prefix, prefix)


def _encode(value: Any, tensors: dict[str, Tensor], prefix: str, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": value.hex()}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if isinstance(value, Tensor):
        return {"$tensor": _set_aside(value, tensors, prefix, where)}
    if kind is np.ndarray:
        if value.dtype.hasobject or value.dtype.byteorder == ">" or value.dtype.names is not None:
            raise _refusal(value, where)
        return {"$ndarray": _set_aside(_as_tensor(value, where), tensors, prefix, where)}
    if kind is list:
        return [_encode(item, tensors, prefix, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind in (tuple, set, frozenset) or (isinstance(value, tuple) and type(value).__len__ is tuple.__len__):
        items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
        tag = "$tuple" if isinstance(value, tuple) else "$set"
        return {tag: [_encode(item, tensors, prefix, f"{where}[{i}]") for i, item in enumerate(items)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, prefix, where)
    raise _refusal(value, where)


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], prefix: str, where: str) -> Any:
    pairs = [(key, _encode(item, tensors, prefix, f"{where}[{key!r}]")) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[_encode(key, tensors, prefix, f"a key of {where}"), item] for key, item in pairs]}
    if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [[_encode(key, tensors, prefix, f"a key of {where}"), item] for key, item in pairs]}


def _set_aside(tensor: Tensor, tensors: dict[str, Tensor], prefix: str, where: str) -> str:
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{where} is a tensor of {tensor.layout} and {tensor.dtype}, which cannot be saved")
    key = f"{prefix}.{len(tensors)}"
    tensors[key] = tensor.detach()
    return key


def _as_tensor(array: np.ndarray[Any, Any], where: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())
    except TypeError as error:
        raise _refusal(array, where) from error


def _refusal(value: object, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds None, bool, int, float, "
        "str, bytes, tensors, numpy arrays, and lists, tuples, sets and dicts of these: pass its state_dict() or "
        "its fields"
    )


def decode(record: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that ``encode`` was given.

    Args:
        record: What ``encode`` returned.
        tensors: The tensors it set aside.

    Raises:
        CheckpointError: It is nothing that ``encode`` returns.

    Example:
        >>> decode({"step": 3, "lrs": {"$tuple": [0.5, {"$float": "inf"}]}}, {})
        {'step': 3, 'lrs': (0.5, inf)}
    """
    if isinstance(record, list):
        return [decode(item, tensors) for item in record]
    if not isinstance(record, dict):
        return record
    tag = next(iter(record)) if len(record) == 1 else ""
    if not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in record.items()}
    try:
        return _DECODERS[tag.removeprefix("$")](record[tag], tensors)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint holds a value that cannot be read: {str(record)[:80]}") from error


def _decode_pairs(items: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(item, tensors) for key, item in items}


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "tensor": lambda key, tensors: tensors[key],
    "ndarray": lambda key, tensors: tensors[key].numpy(),
    "float": lambda text, tensors: float.fromhex(text),
    "bytes": lambda text, tensors: bytes.fromhex(text),
    "tuple": lambda items, tensors: tuple(decode(item, tensors) for item in items),
    "set": lambda items, tensors: {decode(item, tensors) for item in items},
    "dict": _decode_pairs,
    "counter": lambda items, tensors: Counter(_decode_pairs(items, tensors)),
}
