"""Timing that does not disturb what it times."""

from __future__ import annotations

import time

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Collects the duration of every ``with stopwatch:`` block.

    On a GPU by events on the current stream: waiting for the device would end the very overlap that is to be seen.

    Example:
        >>> stopwatch = Stopwatch(torch.device("cpu"))
        >>> with stopwatch:
        ...     pass
        >>> len(stopwatch.seconds())
        1
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """One duration per block, in order; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            return [start.elapsed_time(stop) / 1000.0 for start, stop in pairs]
        return [stop - start for start, stop in zip(self._marks[::2], self._marks[1::2], strict=True)]
