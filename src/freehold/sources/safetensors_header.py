"""Names and shapes from the headers of ``.safetensors`` files; no tensor is read, no library needed.

Format: 8 bytes with the header's length (little endian), then that many bytes of JSON
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import cast

from freehold.errors import SourceError
from freehold.sources.files import read_json
from freehold.sources.routing import route_listed
from freehold.sources.source import ListedParam, ModelSource

__all__ = ["from_index", "from_safetensors"]

_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own reader."""

_SCALE = re.compile(r"(?:_scale|_scale_inv|\.scales?)$")
"""Factors of quantised weights (DeepSeek-V3's ``weight_scale_inv``): they are stored, but not trained."""


def from_safetensors(path: Path) -> ModelSource:
    """Params of one file.

    Raises:
        SourceError: It is no such file, or holds nothing that can be trained.
    """
    return _source(path.name, _header(path))


def from_index(path: Path) -> ModelSource:
    """Params of a model in shards: ``model.safetensors.index.json`` with the files that it names beside it.

    Raises:
        SourceError: A shard is missing or lacks a tensor that the index promises.
    """
    record = read_json(path)
    weight_map = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise SourceError(f"{path}: expected an object with a weight_map of names to files")
    files = cast("dict[str, str]", weight_map)
    missing = sorted({file for file in files.values() if not (path.parent / file).is_file()})
    if missing:
        raise SourceError(f"{path}: {len(missing)} shards are not beside it, {missing[0]} among them")
    tensors: dict[str, ListedParam] = {}
    for file in dict.fromkeys(files.values()):
        tensors |= _header(path.parent / file)
    absent = [name for name in files if name not in tensors]
    if absent:
        raise SourceError(f"{path}: {len(absent)} tensors are not in its shards, {absent[0]!r} among them")
    return _source(path.parent.resolve().name, {name: tensors[name] for name in files})


def _header(path: Path) -> dict[str, ListedParam]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise SourceError(f"{path} is no safetensors file: a header of {length} bytes cannot be")
            record = json.loads(file.read(length))
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path} is no safetensors file: its header is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise SourceError(f"{path} is no safetensors file: its header is no object")
    entries = cast("dict[str, object]", record)
    return {name: _listed(path, name, entry) for name, entry in entries.items() if name != "__metadata__"}


def _listed(path: Path, name: str, entry: object) -> ListedParam:
    match entry:
        case {"dtype": str(dtype), "shape": [*sizes]}:
            return ListedParam(name=name, shape=cast("tuple[int, ...]", tuple(sizes)), dtype=dtype)
        case _:
            raise SourceError(f"{path}: tensor {name!r} has no dtype and shape, got {entry!r:.80}")


def _source(name: str, tensors: dict[str, ListedParam]) -> ModelSource:
    kept: list[ListedParam] = []
    dropped: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype not in _DTYPES:
            dropped[f"of type {tensor.dtype}"] += 1
        elif _SCALE.search(tensor.name):
            dropped["that scale quantised weights"] += 1
        else:
            kept.append(ListedParam(name=tensor.name, shape=tensor.shape, dtype=_DTYPES[tensor.dtype]))
    notes = tuple(f"{count} tensors {reason} are left out." for reason, count in sorted(dropped.items()))
    if not kept:
        raise SourceError(f"{name}: it holds nothing that can be trained. {' '.join(notes)}".rstrip())
    try:
        params, more_notes = route_listed(sorted(kept, key=_model_order))
    except SourceError as error:
        raise SourceError(f"{name}: {error}") from error
    return ModelSource(name=name, params=params, notes=(*notes, *more_notes))


def _model_order(tensor: ListedParam) -> tuple[int, list[tuple[int, int, str]]]:
    """Files are sorted by name, or not at all. Layers count up; embeddings stand first; norm and head stand last."""
    words = re.split(r"[._]", tensor.name.lower())
    has_layer = any(word.isdigit() for word in words)
    is_embedding = any(word.startswith("embed") or word in ("wte", "wpe") for word in words)
    is_head = "head" in words
    place = 1 if has_layer else 0 if is_embedding else 3 if is_head else 2
    parts = re.split(r"(\d+)", tensor.name)
    return place, [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
