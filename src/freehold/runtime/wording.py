"""How messages name many things."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed"]


def listed(items: Sequence[object], limit: int = 5) -> str:
    """The first ``limit`` of ``items``, and how many more there are.

    Example:
        >>> listed(["wq", "wk", "wv"], limit=2)
        "'wq', 'wk' and 1 more"
    """
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(repr, items[:limit])) + more
