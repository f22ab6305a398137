"""Tables in Markdown files that a benchmark writes itself, between two comments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["replace_block"]


def replace_block(file: Path, label: str, lines: Sequence[str]) -> None:
    """Put lines between ``<!-- label: begin -->`` and ``<!-- label: end -->``, each of which stands there once."""
    text = file.read_text(encoding="utf-8")
    begin, end = f"<!-- {label}: begin -->", f"<!-- {label}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{file} must hold {begin!r} and {end!r} once each")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    file.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")
