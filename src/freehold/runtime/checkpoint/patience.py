"""Slow is not dead: ranks that write or read for minutes keep telling each other that they are alive.

A rank that waits for another gives up after ``timeout_s``, since the other may have died. Writing a part of a
checkpoint may take longer than that. So it is done in a thread, while the calling thread exchanges with the other
ranks, several times a second, whether they have finished. A rank that dies meanwhile is noticed as always.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from freehold.runtime.agreement import agree
from freehold.runtime.comm import Comm

__all__ = ["on_all", "wait_for_all"]

_SHORTEST_S, _LONGEST_S = 0.001, 0.25

_T = TypeVar("_T")


def wait_for_all(comm: Comm, done: threading.Event) -> None:
    """Return when the event is set on every rank. Collective."""
    pause_s = _SHORTEST_S
    while True:
        done.wait(pause_s)
        if bool(comm.exchange(torch.tensor([int(done.is_set())])).all()):
            return
        pause_s = min(2 * pause_s, _LONGEST_S)


def on_all(comm: Comm, doing: str, call: Callable[[], _T]) -> _T:
    """Make a call that may take long on every rank; what it returns on this one, if it raised on none. Collective.

    Args:
        comm: The group.
        doing: What is attempted, for messages.
        call: Waits for no other rank.

    Raises:
        FreeholdError: What any rank found, on all ranks.
    """
    found: dict[str, Any] = {}
    done = threading.Event()

    def run() -> None:
        try:
            found["result"] = call()
        except BaseException as error:  # a thread has nobody to raise to
            found["error"] = error if isinstance(error, Exception) else RuntimeError(repr(error))
        done.set()

    threading.Thread(target=run, name="freehold-checkpoint").start()
    wait_for_all(comm, done)
    agree(comm, found.get("error"), doing=doing)
    return found["result"]
