"""Which optimizer manages which Parameter, by identity, so that a second one is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from freehold.errors import LifecycleError
from freehold.runtime.routing import NamedParam
from freehold.runtime.wording import listed

__all__ = ["claim", "next_stripe", "refuse_claimed", "release"]

_owners: Any = WeakIdKeyDictionary()  # Parameter -> weak reference to its optimizer
_stripes: Any = weakref.WeakKeyDictionary()  # process group -> optimizers made on it so far


def refuse_claimed(named: Iterable[NamedParam]) -> None:
    """Raise if any of these params has an optimizer of ours that was not closed.

    Raises:
        LifecycleError: Naming the params.
    """
    taken = [item.name for item in named if item.param in _owners and _owners[item.param]() is not None]
    if taken:
        raise LifecycleError(f"{listed(taken)} are managed by another LayerwiseOptimizer; call its close() first")


def claim(named: Iterable[NamedParam], owner: object) -> None:
    """Record ``owner`` as the optimizer of these params."""
    reference = weakref.ref(owner)
    for item in named:
        _owners[item.param] = reference


def release(named: Iterable[NamedParam], owner: object) -> None:
    """Forget the claims of ``owner``."""
    for item in named:
        if item.param in _owners and _owners[item.param]() in (owner, None):
            del _owners[item.param]


def next_stripe(group: object) -> int:
    """How many optimizers were made on this group before: the same on all ranks, since making one is collective."""
    if group is None:
        return 0
    _stripes[group] = _stripes.get(group, -1) + 1
    return _stripes[group]
