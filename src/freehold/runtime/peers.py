"""How long this rank waits for others, and what it says when nobody comes.

[Note: Faults]
Every wait of the runtime ends: with what was waited for, or after ``timeout_s`` with a ``PeerError`` that names it and
the ranks that did not answer. gloo closes all connections of a process in which a wait ran out of time, and the system
closes those of a process that dies; so a fault of one rank reaches every rank that waits for it, directly or through
others, and none waits longer than ``timeout_s``. What a closed connection cannot say, *why*, the rank that gave up
leaves as a note in the process group's store, before or just after it hangs up. Nothing depends on the notes: they are
written and read in threads that are not waited for longer than a second or two, since the store may have died as well.

After a ``PeerError`` the ranks may hold different weights and the group's connections are gone. So the optimizer
refuses every further call but ``close()``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from freehold.errors import LifecycleError, PeerError
from freehold.runtime.log import FlightLog
from freehold.runtime.wording import listed

__all__ = ["ConnectionLostError", "PeerWatch", "Transfer", "first_line"]

_DEFAULT_TIMEOUT_S = 1800.0  # torch.distributed's own default for gloo: torch.distributed.constants.default_pg_timeout
_LEAST_WAIT_S = 0.001  # gloo takes 0 as "for ever"
_NOTE_S = 1.0  # how long a note may take to be written, and a missing one is waited for
_HANG_UP_TAG = 0x4647_FFFF  # nobody ever sends with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A handle of torch.distributed, and the group rank at its other end (``None``: all of them)."""

    work: Any
    peer: int | None = None


class ConnectionLostError(RuntimeError):
    """A transfer could not be started; never leaves the runtime.

    Args:
        peer: The group rank at its other end.
        text: What torch.distributed says.
    """

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class PeerWatch:
    """Waits for other ranks with a limit, and turns what torch.distributed raises into errors that name ranks.

    Args:
        group: The process group, or ``None`` for a group of one.
        rank: This rank's number in it.
        bounded: Whether waits may be given a limit; on CUDA a limit would block the host, and the watchdog of nccl has
            its own.

    Attributes:
        timeout_s: The longest wait.
        number: Of the optimizer among those on the group, so that nobody reads what was left of an earlier one; -1
            before there is one.
        calling: The public call under way, for messages.
        waiting_for: What is being waited for.
        failure: What went wrong; from then on nothing works any more.
        log: Where waits are recorded.
        bucket_params: The names in each bucket, for messages.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, *, bounded: bool = True) -> None:
        self.timeout_s = _timeout_of(group)
        self.number = -1
        self.calling = ""
        self.waiting_for = ""
        self.failure: PeerError | None = None
        self.log: FlightLog | None = None
        self.bucket_params: Sequence[Sequence[str]] = ()
        self._group = group
        self._rank = rank
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._bounded = bounded
        self._process = os.getpid()
        self._progress: weakref.WeakMethod[Callable[[], str]] | None = None
        if group is not None:
            _watches.add(self)

    def attach(self, log: FlightLog, bucket_params: Sequence[Sequence[str]], progress: Callable[[], str]) -> None:
        """Learn of an optimizer: its log, its buckets, and a bound method that says how far it is (held weakly)."""
        self.log, self.bucket_params, self._progress = log, bucket_params, weakref.WeakMethod(progress)

    def detach(self) -> None:
        """The optimizer was closed: nothing of it is told to others any more, and the group is let go of."""
        _watches.discard(self)
        self._group = None

    @contextlib.contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Name the public call under way, and refuse it after a failure."""
        self.refuse_after_failure()
        before, self.calling = self.calling, call
        try:
            yield
        finally:
            self.calling = before

    def refuse_after_failure(self) -> None:
        """Raise ``LifecycleError`` if a peer was lost, or if this is a fork of the process that trains."""
        if os.getpid() != self._process:
            raise LifecycleError(
                "this process was forked from a rank (a DataLoader worker?): it can neither take part in collectives "
                "nor wait for weights that were on their way. Call opt.synchronize() before the fork, or read no "
                "weights here"
            )
        if self.failure is not None:
            raise LifecycleError(
                f"this optimizer cannot go on: {self.failure}. Start the ranks again from the last checkpoint"
            ) from self.failure

    def of_bucket(self, what: str, bucket: int) -> str:
        """``what`` of a bucket, with the names of its params."""
        names = self.bucket_params[bucket] if bucket < len(self.bucket_params) else ()
        return f"{what} of bucket {bucket}" + (f" (params {listed(names)})" if names else "")

    def wait(self, transfers: Sequence[Transfer], what: str) -> None:
        """Block until all are done, at most ``timeout_s`` together.

        Raises:
            PeerError: A rank died, did not answer in time, or gave up.
            LifecycleError: That had happened before.
        """
        self.refuse_after_failure()
        began = time.monotonic()
        self.waiting_for = what
        for index, transfer in enumerate(transfers):
            try:
                if self._bounded:
                    left = max(began + self.timeout_s - time.monotonic(), _LEAST_WAIT_S)
                    transfer.work.wait(timedelta(seconds=left))
                else:
                    transfer.work.wait()
            except RuntimeError as error:
                waited_s = time.monotonic() - began
                late = self._bounded and waited_s >= 0.95 * self.timeout_s
                # A connection that closed says nothing of the ranks that would have been waited for next.
                silent = [transfer, *(t for t in transfers[index + 1 :] if late and not _is_done(t))]
                missing = sorted({t.peer for t in silent if t.peer is not None})
                raise self.fail(self._text(missing, what, waited_s, error, late=late), missing) from error
        self.waiting_for = ""
        if self.log is not None:
            self.log.add_wait(what, time.monotonic() - began)

    @contextlib.contextmanager
    def starting(self, what: str) -> Iterator[None]:
        """Turn an error of starting a collective (a connection is gone already) into a ``PeerError``."""
        self.refuse_after_failure()
        try:
            yield
        except RuntimeError as error:
            missing = (error.peer,) if isinstance(error, ConnectionLostError) else ()
            text = f"lost the connection to {_named(missing)}, starting {what}{self._in_call()} ({first_line(error)})"
            raise self.fail(text, missing) from error

    def fail(self, text: str, missing: Sequence[int]) -> PeerError:
        """Record a failure, tell the others, hang up; returns the error to raise.

        Args:
            text: What happened.
            missing: The ranks that did not answer, as far as it is known.
        """
        self.failure = PeerError(text)  # at once: nothing below may wait for a peer again
        self.leave_note(f"gave up: {text}")
        self._hang_up()
        notes = self._notes(set(missing))
        _linger()
        parts = [text]
        # A rank that stopped of itself is the cause; those that gave up only pass on what happened to them.
        for start in ("stopped", "gave up"):
            parts += [f"rank {rank} {note}" for rank, note in sorted(notes.items()) if note.startswith(start)]
        silent = [rank for rank in missing if rank not in notes]
        if silent:
            parts.append(f"{_named(silent)} left no word: killed, stopped, or busy with something else")
        if self.log is not None:
            parts.append(f"last events here: {self.log.tail(4)}")
        self.failure = PeerError("; ".join(parts))
        return self.failure

    def abort(self, reason: str) -> None:
        """Let all ranks that wait for this one fail at once, with this reason."""
        gone = self._group is None or not dist.is_initialized()
        if gone or self.failure is not None or os.getpid() != self._process:
            return
        text = f"{reason}{self._where()}"
        self.failure = PeerError(f"this rank gave up: {text}")
        self.leave_note(f"stopped: {text}")
        self._hang_up()
        _linger()

    def leave_note(self, text: str) -> None:
        """Write, for the other ranks to read, why this one takes no further part."""
        store = _store_of(self._group)
        if store is None:
            return
        # All optimizers on the group lose their connections with this one.
        keys = [_key(watch.number, self._rank) for watch in {self, *_watches} if watch._group is self._group]
        _run_for(_NOTE_S, lambda: [store.set(key, text.encode()) for key in keys])

    def _where(self) -> str:
        progress = self._progress() if self._progress is not None else None
        return f" ({progress()})" if progress is not None else ""

    def _in_call(self) -> str:
        return f" in {self.calling}" if self.calling else ""

    def _text(self, missing: Sequence[int], what: str, waited_s: float, error: RuntimeError, *, late: bool) -> str:
        ranks, where = _named(missing), f"{what}{self._in_call()}"
        if late:
            return f"no answer from {ranks} in {waited_s:.1f} s (timeout_s={self.timeout_s:g}), waiting for {where}"
        return f"lost the connection to {ranks}, waiting for {where} ({first_line(error)})"

    def _hang_up(self) -> None:
        """Close this process's connections: gloo does when a wait runs out of time; so let one."""
        if self._group is None or not self._bounded:
            return
        for peer in range(self._num_ranks):
            if peer != self._rank:
                with contextlib.suppress(Exception):  # gone already, or the user destroyed the group
                    work = dist.irecv(torch.empty(1), group=self._group, group_src=peer, tag=_HANG_UP_TAG)
                    assert work is not None, "this rank is in the group"
                    work.wait(timedelta(seconds=_LEAST_WAIT_S))

    def _notes(self, missing: set[int]) -> dict[int, str]:
        """What other ranks wrote; waits a little for those that are missing."""
        store = _store_of(self._group)
        if store is None:
            return {}
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        found: dict[int, str] = {}

        def read() -> None:
            until = time.monotonic() + _NOTE_S
            while True:
                for rank in others:
                    key = _key(self.number, rank)
                    if rank not in found and store.check([key]):
                        found[rank] = store.get(key).decode()
                if missing <= found.keys() or time.monotonic() > until:
                    return
                time.sleep(0.05)

        _run_for(2 * _NOTE_S, read)
        return dict(found)


_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


@atexit.register
def _say_why_this_process_ends() -> None:
    """An exception that nobody caught ends this process: let the others know which."""
    if hasattr(sys, "last_value") and sys.last_value is not None:
        error = sys.last_value
        for watch in list(_watches):
            watch.abort(f"ended with {type(error).__name__}: {first_line(error)}")


def _linger() -> None:
    """The store may live in this process (torchrun has one of its own): let the others read before it ends."""
    if dist.is_initialized() and dist.get_rank() == 0:
        time.sleep(_NOTE_S)


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "other ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + listed(ranks, limit=16)


def _is_done(transfer: Transfer) -> bool:
    """Whether a transfer had finished before the connections were closed."""
    try:
        transfer.work.wait(timedelta(seconds=_LEAST_WAIT_S))
    except RuntimeError:
        return False
    return True


def _run_for(limit_s: float, function: Callable[[], Any]) -> None:
    """Run ``function`` in a thread that nobody waits for longer than this; what it raises is of no interest."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(limit_s)


def _store_of(group: dist.ProcessGroup | None) -> Any:
    if group is None:
        return None
    try:
        return group.get_group_store()
    except (RuntimeError, AttributeError):
        return None


def _timeout_of(group: dist.ProcessGroup | None) -> float:
    if group is None:
        return _DEFAULT_TIMEOUT_S
    for device in (torch.device("cpu"), torch.device("cuda")):
        try:
            return group._get_backend(device).options._timeout.total_seconds()
        except (RuntimeError, AttributeError):
            continue
    return _DEFAULT_TIMEOUT_S


def _key(number: int, rank: int) -> str:
    return f"freehold/fault/{number}/{rank}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the source position that gloo puts before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", lines[0]).split(" This is typically", 1)[0].rstrip(".")
