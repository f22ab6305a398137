"""What is said when something goes wrong: limits, different calls, the report, an exception that nobody catches."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import assert_ranks_agree, data, error_of, everywhere, wrap
from fault_world import free_port
from ranks import run_ranks
from torch import nn

from freehold import AdamW, LayerwiseOptimizer, Muon
from freehold.errors import PlanError, PlanTypeError


def _net() -> nn.Sequential:
    torch.manual_seed(50)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan])
def test_a_limit_out_of_range_is_refused(timeout_s: float) -> None:
    with pytest.raises(PlanError, match="timeout_s"):
        wrap(_net(), timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", ["5", True, [3]])
def test_a_limit_of_another_type_is_refused(timeout_s: Any) -> None:
    with pytest.raises(PlanTypeError, match="timeout_s"):
        wrap(_net(), timeout_s=timeout_s)


def _limits() -> None:
    rank = dist.get_rank()
    errors = everywhere(error_of(lambda: wrap(_net(), timeout_s=-1.0 if rank else 5.0)))
    assert errors[0] == errors[1]
    assert "timeout_s" in errors[0][1]
    errors = everywhere(error_of(lambda: wrap(_net(), timeout_s=5.0 + rank)))
    assert errors[0] == errors[1]
    assert errors[0][0] == "ConsistencyError"
    assert "timeout_s" in errors[0][1]
    opt = wrap(_net())
    assert opt._comm.watch.timeout_s == 90.0  # the group's own, set in run_ranks
    opt.close()


def test_limits_are_those_of_the_group_or_agreed_on() -> None:
    run_ranks(2, _limits)


def _different_calls(pair: tuple[str, str]) -> None:
    model = _net()
    opt = wrap(model, timeout_s=20.0)
    model(data(dist.get_rank(), 3, 8)).sum().backward()
    calls = {
        "step": opt.step,
        "clip": lambda: opt.clip_grad_norm_(1.0),
        "verify": opt.verify,
        "objects": lambda: opt._comm.gather_objects("x"),
        "flags": lambda: opt._comm.max_(torch.zeros(3, dtype=torch.uint8)),
    }
    began = time.monotonic()
    error = error_of(calls[pair[dist.get_rank()]])
    assert error is not None
    assert error[0] == "ConsistencyError", error
    assert time.monotonic() - began < 10.0, "known at once, not after the limit"
    opt.close()


@pytest.mark.parametrize("pair", [("step", "clip"), ("step", "verify"), ("clip", "objects"), ("flags", "step")])
def test_ranks_in_different_calls_find_out_at_once(pair: tuple[str, str]) -> None:
    run_ranks(2, _different_calls, pair)


def _report() -> None:
    model = _net()
    opt = wrap(model, bucket_numel=1)
    lines = opt.debug_report().splitlines()
    assert "between backwards; passes in this window: 0, before it: 0" in lines[0]
    seen: list[str] = []
    model[0].weight.register_hook(lambda grad: seen.append(opt.debug_report()))
    for _ in range(2):
        model(data(dist.get_rank(), 3, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
    assert "in a backward: 2 of 3 buckets launched, bucket 2 waits for gradients of" in seen[0], seen[0]
    assert "REDUCING" in seen[0]
    assert "FILLING" in seen[0]
    report = opt.debug_report()
    assert f"rank {dist.get_rank()} of 2" in report
    assert "GATHERING" in report
    assert "before it: 2" in report
    assert "last waits:" in report
    assert "the reduction of bucket" in report
    assert "failure: none" in report
    assert_ranks_agree(model)
    opt.close()  # the hook above holds it: nothing else would take its guard from the thread


def test_the_report_follows_the_buckets() -> None:
    run_ranks(2, _report)


def test_alone_there_is_nobody_to_lose() -> None:
    opt = LayerwiseOptimizer(_net(), matrix=Muon(), elementwise=AdamW(), timeout_s=1.0)
    with pytest.raises(KeyError, match="mine"), opt.failing_together():
        raise KeyError("mine")
    opt.step()
    assert "rank 0 of 1" in opt.debug_report()
    opt.close()


_SCRIPT = """
import sys, time, torch, torch.distributed as dist, freehold
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
opt = freehold.LayerwiseOptimizer(
    model, matrix=freehold.Muon(), elementwise=freehold.AdamW(), bucket_numel=1, timeout_s=30
)
for step in range(100):
    output = model(torch.ones(2, 8))
    if step == 3 and dist.get_rank() == int(sys.argv[1]):
        def broken(grad):
            raise KeyError("a hook of the user's")
        model[1].weight.register_hook(broken)
    output.sum().backward()
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_that_nobody_catches_reaches_the_others(victim: int, tmp_path: Path) -> None:
    """As under torchrun: plain scripts, no failing_together. The other rank dies of it at once, and knows why."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env |= {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(victim)], env=env | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert 'KeyError: "a hook of the user\'s"' in printed[victim]
    assert "PeerError" in printed[1 - victim], printed[1 - victim]
    assert f'rank {victim} stopped: ended with KeyError: "a hook of the user\'s"' in printed[1 - victim]
    assert "in a backward:" in printed[1 - victim]  # where the victim was, with its bucket and params
    assert "waits for gradients of" in printed[1 - victim]
