"""The manifest: what a checkpoint holds, as JSON that vouches for itself and for every file beside it.

[Note: Format of a checkpoint]
A directory with ``manifest.json`` and ``part-00000.safetensors``, one part for each rank that had something to save.
Tensors are known by name: ``model.<name>`` for weights and buffers, ``optim.<name>.<field>`` for masters and the
rules' state. A tensor consists of one or more chunks, boxes of the full tensor, each in some part. Who saved which
chunk is of no consequence for loading. The manifest is written last, so a directory without one is no checkpoint.

The manifest holds its own SHA-256 and that of every part. It is read as JSON, never unpickled. File names must be those
of parts, offsets must lie in their files, no byte may be listed twice, and chunks must tile their tensors, or it is
refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from freehold.errors import CheckpointError
from freehold.runtime.checkpoint.boxes import tiles
from freehold.runtime.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from freehold.runtime.checkpoint.tensor_file import FileRecord, open_regular

__all__ = ["MANIFEST_NAME", "Chunk", "GroupRecord", "Manifest", "ParamRecord", "TensorRecord", "read_manifest"]

MANIFEST_NAME = "manifest.json"
FORMAT = "freehold.checkpoint"
VERSION = 1
_PART_NAME = re.compile(r"part-[0-9]{5,9}\.safetensors")
_MAX_BYTES = 2**31  # 45,000 params on 4,096 ranks need about 60 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor and where its bytes are.

    Attributes:
        file: Name of the part.
        offset: First byte in it.
        offsets: Of the box, one a dim.
        sizes: Of the box, one a dim.
    """

    file: str
    offset: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A saved tensor: ``dtype``, ``shape``, and the chunks that tile it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRecord:
    """A managed param.

    Attributes:
        rule: ``"matrix"`` or ``"elementwise"``.
        rule_class: Name of the rule's class.
        num_steps: Updates so far.
        objects: What the rule keeps per matrix, encoded; empty for most rules.
    """

    rule: str
    rule_class: str
    num_steps: int
    objects: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A param group: its pattern and rule, the names of its params, its options (encoded)."""

    pattern: str
    rule: str
    params: tuple[str, ...]
    options: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything but the bytes of the tensors.

    Attributes:
        layout: Of the run that saved it, for people; loading does not look at it.
        created_ns: When it was written, in nanoseconds since 1970.
        files: The parts.
        tensors: By key.
        params: The managed params by name.
        tied: Further names of params and buffers, and the name that each is saved under.
        groups: The param groups.
        extra: The user's, encoded.
    """

    layout: Mapping[str, Any]
    created_ns: int
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    params: Mapping[str, ParamRecord]
    tied: Mapping[str, str]
    groups: tuple[GroupRecord, ...]
    extra: Any

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        body = {
            "layout": dict(self.layout),
            "created_ns": self.created_ns,
            "files": [[f.name, f.num_bytes, f.sha256] for f in self.files],
            "tensors": {key: _tensor_record(tensor) for key, tensor in self.tensors.items()},
            "params": {
                name: {"rule": p.rule, "class": p.rule_class, "steps": p.num_steps, "objects": list(p.objects)}
                for name, p in self.params.items()
            },
            "tied": dict(self.tied),
            "groups": [
                {"pattern": g.pattern, "rule": g.rule, "params": list(g.params), "options": g.options}
                for g in self.groups
            ],
            "extra": self.extra,
        }
        return _canonical({"format": FORMAT, "version": VERSION, "sha256": _digest(body), "body": body})


def _tensor_record(record: TensorRecord) -> dict[str, Any]:
    chunks = [[chunk.file, chunk.offset, list(chunk.offsets), list(chunk.sizes)] for chunk in record.chunks]
    return {"dtype": DTYPE_NAMES[record.dtype], "shape": list(record.shape), "chunks": chunks}


def _canonical(value: Any) -> str:
    """The one text of a value: reading it and writing it again changes no byte, the order of its keys included."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _digest(body: Any) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked against itself; the parts are not opened.

    Raises:
        CheckpointError: There is none, or it is damaged, or of another version, or asks for what no checkpoint has.
    """
    where = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory; expected a checkpoint that freehold.save wrote")
    try:
        with open(open_regular(where), "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
    try:
        top = json.loads(raw)
        found = (top["format"], top["version"])
        if found != (FORMAT, VERSION):
            raise CheckpointError(f"{where}: expected {FORMAT!r} of version {VERSION}, got {found[0]!r} of {found[1]}")
        if len(raw) > _MAX_BYTES or _digest(top["body"]) != top["sha256"] or _canonical(top).encode() != raw:
            raise CheckpointError(f"{where} was changed or damaged after it was written (its SHA-256 differs)")
        manifest = _parse(top["body"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is no manifest, or a damaged one: {type(error).__name__}: {error}") from error
    problems = _problems(manifest)
    if problems:
        raise CheckpointError(f"{where} is not sound: " + "; ".join(problems[:5]))
    return manifest


def _parse(body: dict[str, Any]) -> Manifest:
    return Manifest(
        layout=body["layout"],
        created_ns=_count(body["created_ns"]),
        files=tuple(FileRecord(name=str(f[0]), num_bytes=_count(f[1]), sha256=str(f[2])) for f in body["files"]),
        tensors={
            key: TensorRecord(
                dtype=DTYPES[record["dtype"]],
                shape=_counts(record["shape"]),
                chunks=tuple(
                    Chunk(file=str(c[0]), offset=_count(c[1]), offsets=_counts(c[2]), sizes=_counts(c[3]))
                    for c in record["chunks"]
                ),
            )
            for key, record in body["tensors"].items()
        },
        params={
            name: ParamRecord(
                rule=str(p["rule"]),
                rule_class=str(p["class"]),
                num_steps=_count(p["steps"]),
                objects=tuple(p["objects"]),
            )
            for name, p in body["params"].items()
        },
        tied={str(alias): str(name) for alias, name in body["tied"].items()},
        groups=tuple(
            GroupRecord(pattern=str(g["pattern"]), rule=str(g["rule"]), params=tuple(g["params"]), options=g["options"])
            for g in body["groups"]
        ),
        extra=body["extra"],
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected an int >= 0, got {value!r}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _problems(manifest: Manifest) -> list[str]:
    problems = [f"file name {f.name!r}" for f in manifest.files if not _PART_NAME.fullmatch(f.name)]
    sizes = {f.name: f.num_bytes for f in manifest.files}
    if len(sizes) != len(manifest.files):
        problems.append("a file is listed twice")
    for key, record in manifest.tensors.items():
        if not tiles(record.shape, [(c.offsets, c.sizes) for c in record.chunks]):
            problems.append(f"chunks of {key!r} are missing or overlap")
        for chunk in record.chunks:
            end = chunk.offset + math.prod(chunk.sizes) * record.dtype.itemsize
            if end > sizes.get(chunk.file, -1):
                problems.append(f"a chunk of {key!r} ends at byte {end:,} of {chunk.file!r}, past its end")
    return problems + _overlaps(manifest.tensors)


def _overlaps(tensors: Mapping[str, TensorRecord]) -> list[str]:
    """Bytes that are listed twice: a small file could claim any amount of memory with them."""
    runs = sorted(
        (chunk.file, chunk.offset, chunk.offset + math.prod(chunk.sizes) * record.dtype.itemsize, key)
        for key, record in tensors.items()
        for chunk in record.chunks
        if math.prod(chunk.sizes) > 0
    )
    return [
        f"chunks of {key!r} and {other!r} overlap in {file!r}"
        for (file, _, end, key), (other_file, start, _, other) in itertools.pairwise(runs)
        if file == other_file and start < end
    ]
