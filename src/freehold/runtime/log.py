"""A short record of what the runtime did, in order: for tests, and for finding out why a rank waits."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Event", "FlightLog", "Kind", "Wait"]

Kind = Literal["reduce launched", "reduce finished", "gather launched", "gather finished", "updated"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a bucket, and when (``time.monotonic``)."""

    kind: Kind
    bucket: int
    at_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait for other ranks that ended well."""

    what: str
    waited_s: float
    at_s: float


class FlightLog:
    """The last events and waits, oldest first; older ones fall out."""

    def __init__(self, capacity: int = 4096) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._waits: deque[Wait] = deque(maxlen=64)

    def add(self, kind: Kind, bucket: int) -> None:
        """Append an event."""
        self._events.append(Event(kind, bucket, time.monotonic()))

    def add_wait(self, what: str, waited_s: float) -> None:
        """Append a wait."""
        self._waits.append(Wait(what=what, waited_s=waited_s, at_s=time.monotonic()))

    def events(self) -> list[Event]:
        """A copy of the events held."""
        return list(self._events)

    def waits(self) -> list[Wait]:
        """A copy of the waits held."""
        return list(self._waits)

    def latest(self) -> dict[tuple[Kind, int], Event]:
        """The latest event of each kind in each bucket, of those still held."""
        return {(e.kind, e.bucket): e for e in self.events()}

    def tail(self, count: int = 6) -> str:
        """The last events in words, for messages."""
        now = time.monotonic()
        last = list(self._events)[-count:]
        return ", ".join(f"{e.kind} (bucket {e.bucket}, {now - e.at_s:.2f} s ago)" for e in last) or "none"

    def clear(self) -> None:
        """Forget all events and waits."""
        self._events.clear()
        self._waits.clear()
