"""A short record of what the runtime did, in order: for tests, and for finding out why a rank waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "FlightLog"]

Kind = Literal["reduce launched", "reduce finished", "gather launched", "gather finished", "updated"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a bucket."""

    kind: Kind
    bucket: int


class FlightLog:
    """The last events, oldest first; older ones fall out."""

    def __init__(self, capacity: int = 4096) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)

    def add(self, kind: Kind, bucket: int) -> None:
        """Append an event."""
        self._events.append(Event(kind, bucket))

    def events(self) -> list[Event]:
        """A copy of the events held."""
        return list(self._events)

    def clear(self) -> None:
        """Forget all events."""
        self._events.clear()
