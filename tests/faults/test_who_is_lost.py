"""Errors name the ranks that are lost, not those that were merely waited for next, nor those of earlier optimizers."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from cases import wrap
from ranks import run_ranks
from torch import nn

from freehold.errors import PeerError
from freehold.runtime.peers import PeerWatch, Transfer


class Closed:
    """A transfer whose connection is gone."""

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("Connection closed by peer")


class Silent:
    """A transfer that nobody answers."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Timed out waiting")


class Done:
    """A transfer that is over."""

    def wait(self, timeout: timedelta) -> None:
        return None


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([Done(), Closed(), Silent(), Silent()], "lost the connection to rank 2, waiting"),
        ([Done(), Silent(), Done(), Silent()], "no answer from ranks 2, 4 in"),
    ],
    ids=["closed", "silent"],
)
def test_ranks_that_still_have_time_are_not_called_lost(works: list[object], expected: str) -> None:
    watch = PeerWatch(None, 0)
    watch.timeout_s = 0.2
    with pytest.raises(PeerError) as caught:
        watch.wait([Transfer(work=work, peer=rank) for rank, work in enumerate(works, start=1)], "a test")
    assert expected in str(caught.value)


def _notes() -> None:
    other = 1 - dist.get_rank()
    first = wrap(nn.Linear(8, 8))
    first._comm.watch.leave_note("stopped: long ago")
    first.close()
    second, third = wrap(nn.Linear(8, 8)), wrap(nn.Linear(8, 8))
    dist.barrier()
    assert second._comm.watch._notes({other}) == {}
    dist.barrier()
    second._comm.watch.leave_note("stopped: just now")
    dist.barrier()
    assert third._comm.watch._notes({other}) == {other: "stopped: just now"}  # their connections are the same
    dist.barrier()
    second.close()
    third.close()


def test_what_an_earlier_optimizer_left_is_not_read_by_a_later_one() -> None:
    run_ranks(2, _notes)
