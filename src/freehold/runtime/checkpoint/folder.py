"""Directories: one under construction, one complete, the newest of many, and those that are no longer wanted.

A checkpoint is built in a hidden directory beside its place and renamed once everything in it is on disk. So there is
never a directory of a checkpoint's name that is not a checkpoint, whenever a process is killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freehold.errors import CheckpointError
from freehold.runtime.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest

__all__ = ["claim_folder", "discard", "latest", "prune", "publish", "telling"]

_BUILDING = ".building-"
_DELETING = ".deleting-"
_active: set[Path] = set()  # under construction by this process: pruning leaves them alone


@contextmanager
def telling(doing: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a ``CheckpointError`` that says what was attempted."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{doing} {path} failed: {error.strerror or error}") from error


def claim_folder(target: Path) -> Path:
    """Make the directory in which the checkpoint ``target`` is built, and remove what killed saves of it left.

    Raises:
        CheckpointError: There is something at ``target`` already, or the directory cannot be made.
    """
    if os.path.lexists(target):
        raise CheckpointError(
            f"{target} exists already; a checkpoint is never overwritten: give each its own name, such as its step"
        )
    with telling("making a directory for the checkpoint", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in _hidden(target.parent):
            if left.name.startswith(f".{target.name}{_BUILDING}"):
                shutil.rmtree(left, ignore_errors=True)
        folder = target.parent / f".{target.name}{_BUILDING}{secrets.token_hex(4)}"
        folder.mkdir()
    _active.add(folder)
    return folder


def publish(folder: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest and let the checkpoint appear at its place, all or nothing.

    Raises:
        OSError: The file system refused.
    """
    partial = folder / f"{MANIFEST_NAME}.partial"
    with open(partial, "x", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, folder / MANIFEST_NAME)
    _sync_directory(folder)
    os.rename(folder, target)
    _active.discard(folder)
    _sync_directory(target.parent)


def discard(folder: Path) -> None:
    """Remove a directory under construction; what cannot be removed is hidden and harmless."""
    shutil.rmtree(folder, ignore_errors=True)
    _active.discard(folder)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a directory, or ``None``.

    Complete means: a sound manifest, and every part it lists at its full length. (``freehold.load`` checks every
    byte.) Newest means: written last, by the manifest's own clock. What killed saves left behind, and anything else in
    the directory, is passed over.

    Args:
        directory: The parent of the checkpoints; it may be missing.

    Example:
        >>> import freehold, tempfile
        >>> print(freehold.latest(tempfile.gettempdir() + "/no-such-directory"))
        None
    """
    found = _complete(Path(directory))
    return found[-1] if found else None


def prune(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest ``keep``, and what killed saves and prunings left.

    Raises:
        OSError: The file system refused.
    """
    for path in _complete(directory)[:-keep]:
        doomed = path.with_name(f".{path.name}{_DELETING}{secrets.token_hex(4)}")
        os.rename(path, doomed)  # from here on it is no checkpoint, however far the removal comes
    for left in _hidden(directory):
        if left not in _active and (_DELETING in left.name or _BUILDING in left.name):
            shutil.rmtree(left, ignore_errors=True)


def _complete(directory: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    found: list[tuple[int, str, Path]] = []
    for path in _listing(directory):
        if path.name.startswith(".") or not (path / MANIFEST_NAME).is_file():
            continue
        try:
            manifest = read_manifest(path)
            sizes = [(path / record.name).lstat().st_size for record in manifest.files]
        except (CheckpointError, OSError):
            continue
        if sizes == [record.num_bytes for record in manifest.files]:
            found.append((manifest.created_ns, path.name, path))
    return [path for _, _, path in sorted(found)]


def _hidden(directory: Path) -> list[Path]:
    return [path for path in _listing(directory) if path.name.startswith(".")]


def _listing(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
