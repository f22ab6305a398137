"""A transport in which nothing arrives before it is waited for, however fast the machine is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from freehold.runtime import comm as comm_module
from freehold.runtime import optimizer as optimizer_module
from freehold.runtime.comm import Comm, Pending


class LateComm(Comm):
    """Wraps a transport: results appear in ``wait()`` and at no other time.

    What is to be reduced is read in ``wait()`` as well, after freed memory was filled with NaN: a buffer that nobody
    keeps, or that somebody writes while it is in flight, gives wrong numbers every time.
    """

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.num_ranks = inner.num_ranks
        self.max_in_flight = inner.max_in_flight
        self.watch = inner.watch

    def reduce_scatter(self, flat: Tensor, bucket: int) -> Pending:
        def finish() -> None:
            poison_freed_memory(flat.numel() // self.num_ranks)
            self.inner.reduce_scatter(flat, bucket).wait()

        return Pending([], (flat,), finish)

    def all_gather(self, flat: Tensor, bucket: int) -> Pending:
        arrived = flat.clone()
        self.inner.all_gather(arrived, bucket).wait()

        def finish() -> None:
            flat.copy_(arrived)

        return Pending([], (flat, arrived), finish)

    def broadcast_(self, tensor: Tensor) -> None:
        self.inner.broadcast_(tensor)

    def exchange(self, row: Tensor) -> Tensor:
        return self.inner.exchange(row)

    def max_(self, flags: Tensor) -> Tensor:
        return self.inner.max_(flags)

    def gather_objects(self, value: object) -> list[Any]:
        return self.inner.gather_objects(value)


def poison_freed_memory(numel: int) -> None:
    """Write NaN over memory that was freed."""
    held = [torch.full((numel,), float("nan")) for _ in range(8)]
    del held


@contextlib.contextmanager
def late_arrivals() -> Iterator[None]:
    """Optimizers made inside get a ``LateComm``."""
    with mock.patch.object(optimizer_module, "make_comm", lambda *args: LateComm(comm_module.make_comm(*args))):
        yield
