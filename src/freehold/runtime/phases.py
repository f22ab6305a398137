"""The life of a bucket: one gradient phase and one weight phase, each changed here and nowhere else.

[Note: Buckets, windows and passes]
A *window* is what one optimizer step covers: all backwards since the last step or ``zero_grad``. A *pass* launches the
reduction of every bucket exactly once, in bucket order. The first backward of a window outside ``no_sync()`` is the
first pass; a rank that had none runs it with zeros when it comes to ``step``. So on every rank the launches of the
first pass come before the exchange of ``step``, whatever its backward did: no order of collectives depends on the
data. Gradients of further backwards are kept, and reduced in one second pass that the exchange decides on: a bucket is
opened again, its owner's sum so far is set aside (``carry``) and added to the new one.
"""

from __future__ import annotations

import enum
from typing import TypeVar

__all__ = ["GradPhase", "WeightPhase", "move"]


class GradPhase(enum.Enum):
    """Who owns the memory of a bucket's gradients."""

    IDLE = enum.auto()
    """Entered by a completed step, a discard or a skip. The content is meaningless; autograd has not written yet."""

    FILLING = enum.auto()
    """Entered by the first gradient of a window (or of a further pass). Backward hooks write; nothing is in flight."""

    REDUCING = enum.auto()
    """Entered by the launch. The transport reads and writes the buffer; nobody else may touch it."""

    REDUCED = enum.auto()
    """Entered when the reduction was waited for. The own shard holds the average over ranks; the rest is stale."""


class WeightPhase(enum.Enum):
    """Which rank holds current weights of a bucket."""

    READY = enum.auto()
    """Entered at the start and when a gather was waited for. Every rank holds every weight."""

    UPDATED = enum.auto()
    """Entered in ``step``, once the owners have updated. The own shard is new; the others' are of the last step."""

    GATHERING = enum.auto()
    """Entered by the launch of the all-gather. The transport writes the other shards; forward hooks wait."""


_LEGAL: dict[enum.Enum, tuple[enum.Enum, ...]] = {
    GradPhase.IDLE: (GradPhase.FILLING, GradPhase.REDUCING, GradPhase.IDLE),
    GradPhase.FILLING: (GradPhase.REDUCING, GradPhase.IDLE),
    GradPhase.REDUCING: (GradPhase.REDUCED,),
    GradPhase.REDUCED: (GradPhase.FILLING, GradPhase.IDLE),
    WeightPhase.READY: (WeightPhase.UPDATED,),
    WeightPhase.UPDATED: (WeightPhase.GATHERING,),
    WeightPhase.GATHERING: (WeightPhase.READY,),
}


_Phase = TypeVar("_Phase", GradPhase, WeightPhase)


def move(current: _Phase, target: _Phase) -> _Phase:
    """Return ``target`` if the table of legal moves allows it from ``current``; anything else is a bug of ours."""
    assert target in _LEGAL[current], f"illegal move {current=} {target=}"
    return target
