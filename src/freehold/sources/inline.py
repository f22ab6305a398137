"""Matrices typed on the command line: ``128x2688x1856,4x1024x1024`` or ``stack:128x1536x2048``."""

from __future__ import annotations

import re
from collections import Counter

from freehold.errors import SourceError
from freehold.plan.spec import ParamSpec
from freehold.sources.source import ModelSource

__all__ = ["from_inline", "looks_inline"]

_START = re.compile(r"\s*(?:stack:|[+-]?\d+\s*x)")
_ENTRY = re.compile(r"(stack:)?([+-]?\d+(?:x[+-]?\d+)*)")
_GRAMMAR = "COUNTxROWSxCOLS, ROWSxCOLS or stack:COUNTxROWSxCOLS, separated by commas"

_MAX_COUNT = 1_000_000
"""More matrices than any model has; beyond it the planner would take hours."""


def looks_inline(text: str) -> bool:
    """Whether a source is meant as shapes and not as a path (write ``./128x64`` for a file of that name).

    Example:
        >>> looks_inline("128x2688x1856"), looks_inline("models/config.json")
        (True, False)
    """
    return _START.match(text) is not None


def from_inline(text: str) -> ModelSource:
    """Read shapes; every one is updated as matrices.

    Args:
        text: Entries separated by commas. ``128x2688x1856`` is 128 matrices of their own, ``2688x1856`` is one, and
            ``stack:128x1536x2048`` is one 3-D param that holds 128.

    Raises:
        SourceError: The text is not of this form, or a number is below 1.

    Example:
        >>> [(spec.name, spec.shape) for spec in from_inline("2x64x32,stack:8x64x32").params]
        [('64x32.0', (64, 32)), ('64x32.1', (64, 32)), ('stack:8x64x32.0', (8, 64, 32))]
    """
    names: Counter[str] = Counter()
    params: list[ParamSpec] = []
    for entry in text.split(","):
        label, count, shape = _entry(entry.replace(" ", ""))
        if len(params) + count > _MAX_COUNT:
            raise SourceError(f"{entry.strip()!r}: more than {_MAX_COUNT} matrices")
        for _ in range(count):
            params.append(ParamSpec(name=f"{label}.{names[label]}", shape=shape))
            names[label] += 1
    return ModelSource(name=text, params=tuple(params))


def _entry(text: str) -> tuple[str, int, tuple[int, ...]]:
    """Label, how many params, and their shape."""
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise SourceError(f"cannot read {text!r} as shapes: expected {_GRAMMAR}")
    sizes = tuple(int(size) for size in match[2].split("x"))
    if min(sizes) < 1:
        raise SourceError(f"{text!r}: every number must be at least 1, got {min(sizes)}")
    if match[1]:
        if len(sizes) != 3:
            raise SourceError(f"{text!r}: a stack has three sizes, stack:COUNTxROWSxCOLS, got {len(sizes)}")
        return text, 1, sizes
    if len(sizes) not in (2, 3):
        raise SourceError(f"cannot read {text!r} as shapes: expected {_GRAMMAR}")
    rows, cols = sizes[-2:]
    return f"{rows}x{cols}", sizes[0] if len(sizes) == 3 else 1, (rows, cols)
