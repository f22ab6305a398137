"""What the optimizer offers for the day when something goes wrong: giving up together, and a report of where it is."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from freehold.errors import PlanError, PlanTypeError
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.comm import Comm
from freehold.runtime.log import Event, FlightLog, Kind
from freehold.runtime.peers import first_line
from freehold.runtime.reducer import GradientReducer

__all__ = ["FaultHandling", "check_timeout", "collective"]

_COLUMNS: tuple[Kind, ...] = ("reduce launched", "reduce finished", "gather launched", "gather finished")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def check_timeout(timeout_s: object) -> None:
    """Refuse what is no limit.

    Raises:
        PlanTypeError: Not a number.
        PlanError: Not above 0, or not finite.
    """
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise PlanTypeError(f"timeout_s must be a number of seconds or None, got {timeout_s!r}")
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise PlanError(f"timeout_s must be finite and above 0, got {timeout_s}")


def collective(method: _Method) -> _Method:
    """Decorate a public call that waits for other ranks: errors name it, and it is refused once a rank was lost."""

    @functools.wraps(method)
    def call(self: FaultHandling, *args: Any, **kwargs: Any) -> Any:
        with self._comm.watch.during(method.__name__.removeprefix("_")):
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


class FaultHandling:
    """The part of ``LayerwiseOptimizer`` that is about faults. See [Note: Faults] in ``peers.py``."""

    _comm: Comm
    _log: FlightLog
    _reducer: GradientReducer
    _buckets: list[BucketBuffers]

    def abort(self, error: BaseException | str) -> None:
        """Give up, and let every rank that waits for this one fail at once, with this error. Needs no other rank.

        On gloo all connections of this process in the group are closed; the others' next wait raises ``PeerError`` with
        the text. With nccl the others learn of it when this process ends, or from nccl's watchdog.

        Args:
            error: Why. Its type and text reach the other ranks.

        Example:
            >>> import torch, freehold
            >>> model = torch.nn.Linear(4, 4)
            >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
            >>> opt.abort("bad data")  # alone there is nobody to tell
            >>> opt.close()
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {first_line(error)}"
        self._comm.watch.abort(text)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Around a training loop: whatever ends it by an exception on this rank ends it on all, at once.

        Without it the others learn of an exception when this process ends, or after ``timeout_s``.

        Example:
            >>> import torch, freehold
            >>> model = torch.nn.Linear(4, 4)
            >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
            >>> with opt.failing_together():
            ...     for _ in range(2):
            ...         model(torch.ones(1, 4)).sum().backward()
            ...         opt.step()
            ...         opt.zero_grad()
            >>> opt.close()
        """
        try:
            yield
        except BaseException as error:  # KeyboardInterrupt and SystemExit leave the others alone as well
            self.abort(error)
            raise

    def debug_report(self) -> str:
        """Where this rank is: per bucket the phases and how long ago things happened, the window, the last waits.

        Touches no tensor and waits for nothing, so that it may be called from another thread of a process that hangs.

        Example:
            >>> import torch, freehold
            >>> model = torch.nn.Linear(4, 4)
            >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
            >>> print(opt.debug_report().splitlines()[0])
            rank 0 of 1: between backwards; passes in this window: 0, before it: 0
            >>> opt.close()
        """
        watch = self._comm.watch
        lines = [f"rank {self._comm.rank} of {self._comm.num_ranks}: {self._progress()}"]
        lines.append(f"timeout_s={watch.timeout_s:g}; failure: {watch.failure or 'none'}")
        if watch.calling or watch.waiting_for:
            lines.append(f"in {watch.calling or 'no call'}; waiting for {watch.waiting_for or 'nothing'}")
        now, latest = time.monotonic(), self._log.latest()
        columns = "reduce launched/finished  gather launched/finished"
        lines.append(f"{'bucket':>6}  {'gradients':<9}  {'weights':<9}  {'missing':>7}  {columns}")
        for bucket in self._buckets:
            ages = [_age(latest.get((kind, bucket.index)), now) for kind in _COLUMNS]
            lines.append(
                f"{bucket.index:>6}  {bucket.grad_phase.name:<9}  {bucket.weight_phase.name:<9}  {bucket.missing:>7}  "
                f"{ages[0]:>15} {ages[1]:>8}  {ages[2]:>15} {ages[3]:>8}"
            )
        lines.append("last waits:")
        lines += [f"  {w.waited_s:9.4f} s, {now - w.at_s:8.2f} s ago: {w.what}" for w in self._log.waits()[-8:]]
        return "\n".join(lines)

    def _progress(self) -> str:
        return self._reducer.progress()


def _age(event: Event | None, now: float) -> str:
    return "-" if event is None else f"{now - event.at_s:.2f}s"
