"""Reading JSON files, plain or gzipped, with errors that say which file and what is wrong with it."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

from freehold.errors import SourceError

__all__ = ["read_json"]

_GZIP_MAGIC = b"\x1f\x8b"


def read_json(path: Path) -> object:
    """What a JSON file holds; gzip is recognised by its first bytes.

    Raises:
        SourceError: The file cannot be read, unpacked or parsed.
    """
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
        return json.loads(data)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is no JSON file: {error}") from error
