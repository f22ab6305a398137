"""From what a user types to params: tells the kinds of source apart by what they hold, not by what they are called."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from freehold.errors import SourceError
from freehold.sources.files import read_json
from freehold.sources.hf_config import from_config
from freehold.sources.inline import from_inline, looks_inline
from freehold.sources.listing import from_list
from freehold.sources.safetensors_header import from_index, from_safetensors
from freehold.sources.source import ModelSource

__all__ = ["load_source"]

_FOLDER_FILES = ("config.json", "model.safetensors.index.json", "model.safetensors")
"""What is looked for in a folder, in this order."""


def load_source(text: str) -> ModelSource:
    """Params from a path or from inline shapes.

    Args:
        text: A Hugging Face ``config.json``, a ``.safetensors`` file, its ``index.json``, a JSON list
            ``[[name, shape], ...]`` (also gzipped), a folder with one of the first three, or shapes such as
            ``128x2688x1856,4x1024x1024`` and ``stack:128x1536x2048``.

    Raises:
        SourceError: There is no such file, or it cannot be understood.

    Example:
        >>> len(load_source("128x2688x1856,4x1024x1024").params)
        132
    """
    if looks_inline(text):
        return from_inline(text)
    path = _existing(text)
    if path.suffix == ".safetensors":
        return from_safetensors(path)
    record = read_json(path)
    if isinstance(record, list):
        return from_list(record, name=path.name)
    if isinstance(record, dict) and "weight_map" in record:
        return from_index(path)
    if isinstance(record, dict):
        return from_config(cast("dict[str, object]", record), path=path)
    raise SourceError(f"{path}: expected a config.json, an index.json or a list [[name, shape], ...]")


def _existing(text: str) -> Path:
    path = Path(text)
    try:
        if path.is_file():
            return path
        if text and path.is_dir():
            found = next((path / name for name in _FOLDER_FILES if (path / name).is_file()), None)
            if found is None:
                raise SourceError(f"{path} is a folder without {', '.join(_FOLDER_FILES[:-1])} or {_FOLDER_FILES[-1]}")
            return found
    except OSError as error:
        raise SourceError(f"cannot read {text!r:.200}: {error.strerror}") from error
    raise SourceError(f"no such file: {text!r} (and it is no list of shapes such as 128x2688x1856)")
