"""One file of tensors in the safetensors format, written as a stream and read piece by piece.

The format is a length, a JSON header and the bytes of the tensors, without holes
(https://github.com/huggingface/safetensors#format), so that other tools can open a part of a checkpoint. We write it
ourselves, because the library's writer makes a second copy of all data, and neither checksums nor syncs.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from freehold.errors import CheckpointError
from freehold.runtime.checkpoint.dtypes import SAFETENSORS_NAMES

__all__ = ["FileRecord", "Part", "TensorFile", "as_bytes", "hash_file", "open_regular", "read_into"]

_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor to be written, under a name that is unique in its file."""

    name: str
    tensor: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a finished file must look like: its name, length, and SHA-256 in hex."""

    name: str
    num_bytes: int
    sha256: str


class TensorFile:
    """The plan of one file: what stands where is known before a byte is written.

    Args:
        parts: What goes into it, in order. Larger element sizes first keep every tensor aligned.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position, begins = 0, list[int]()
        for part in parts:
            begins.append(position)
            header[part.name] = {
                "dtype": SAFETENSORS_NAMES[part.tensor.dtype],
                "shape": list(part.tensor.shape),
                "data_offsets": [position, position + part.num_bytes],
            }
            position += part.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.offsets = tuple(len(self._head) + begin for begin in begins)
        self.num_bytes = len(self._head) + position

    def write(self, path: Path) -> FileRecord:
        """Write and sync the file; it must not exist.

        Raises:
            OSError: The file system refused.
        """
        digest = hashlib.sha256()
        with open(path, "xb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(self._head), digest)
            for part in self.parts:
                _write_all(file.fileno(), as_bytes(part.tensor.detach().cpu().contiguous()), digest)
            os.fsync(file.fileno())
        return FileRecord(name=path.name, num_bytes=self.num_bytes, sha256=digest.hexdigest())


def _write_all(descriptor: int, view: memoryview, digest: hashlib._Hash) -> None:
    while view:
        digest.update(view[:_CHUNK_BYTES])
        piece = view[:_CHUNK_BYTES]
        while piece:
            piece = piece[os.write(descriptor, piece) :]
        view = view[_CHUNK_BYTES:]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, of any dtype and shape."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file; links are not followed, so a checkpoint cannot point out of itself.

    Raises:
        CheckpointError: It is missing, a link, or no file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing from the checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return descriptor


def hash_file(folder: Path, record: FileRecord) -> str:
    """What is wrong with a file of a checkpoint, as text; empty if nothing is.

    Args:
        folder: Of the checkpoint.
        record: What the manifest says.
    """
    try:
        descriptor = open_regular(folder / record.name)
    except CheckpointError as error:
        return str(error)
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        if found != record.num_bytes:
            return f"{folder / record.name} has {found:,} bytes where {record.num_bytes:,} were written"
        digest = hashlib.sha256()
        try:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        except OSError as error:
            return f"{folder / record.name} cannot be read: {error.strerror}"
    if digest.hexdigest() != record.sha256:
        return f"{folder / record.name} was changed or damaged after it was written (its SHA-256 differs)"
    return ""


def read_into(descriptor: int, offset: int, tensor: Tensor) -> None:
    """Fill a contiguous CPU tensor from a file.

    Raises:
        CheckpointError: The file ends too early.
    """
    view = as_bytes(tensor)
    while view:
        num_read = os.preadv(descriptor, [view[:_CHUNK_BYTES]], offset)
        if num_read == 0:
            raise CheckpointError("a file of the checkpoint ends too early; it was changed while it was read")
        view, offset = view[num_read:], offset + num_read
