"""Run a function on several gloo ranks, with a time limit, and show every rank's output if it fails.

Worker processes are kept from test to test (importing torch takes seconds); each job gets a process group of its own. A
pool in which a job failed or hung is killed and made anew.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

_context = multiprocessing.get_context("spawn")
_pools: dict[int, Any] = {}


class RanksError(AssertionError):
    """At least one rank raised, died or ran out of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    store: str
    output: str
    timeout_s: float


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh gloo group; return what each rank returned.

    Args:
        num_ranks: Processes.
        function: A top-level function of a test module.
        *args: Picklable.
        timeout_s: After this long all ranks are killed and their stacks shown.
    """
    pool = _pools.get(num_ranks) or _pools.setdefault(num_ranks, _Pool(num_ranks))
    try:
        return pool.run(function, args, timeout_s)
    except RanksError:
        _pools.pop(num_ranks).kill()
        raise


class _Pool:
    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.pipes, self.processes = [], []
        for rank in range(num_ranks):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, num_ranks, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:  # a job's time limit must not pay for importing torch
            pipe.recv()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self.pipes):
                output = os.path.join(folder, f"rank{rank}.txt")
                store = os.path.join(folder, "store")
                pipe.send(_Job(function=function, args=args, store=store, output=output, timeout_s=timeout_s))
            # A few seconds more than the workers' own limit, so that they can write their stacks.
            deadline = time.monotonic() + timeout_s + 5.0
            answers = [self._answer(rank, deadline) for rank in range(self.num_ranks)]
            if all(ok for ok, _ in answers):
                return [value for _, value in answers]
            raise RanksError(self._report(answers, folder))

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        try:
            if self.pipes[rank].poll(max(0.1, deadline - time.monotonic())):
                return self.pipes[rank].recv()
        except EOFError:
            return False, "the process died"
        return False, "no answer in time"

    def _report(self, answers: list[tuple[bool, Any]], folder: str) -> str:
        parts = []
        for rank, (ok, value) in enumerate(answers):
            path = Path(folder, f"rank{rank}.txt")
            printed = path.read_text()[-4000:] if path.exists() else ""
            parts.append(f"--- rank {rank}: {'finished' if ok else value}\n{printed}")
        return "\n" + "\n".join(parts)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


@atexit.register
def stop_pools() -> None:
    """Kill all workers."""
    for pool in _pools.values():
        pool.kill()
    _pools.clear()


def _serve(rank: int, num_ranks: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        with (
            open(job.output, "w") as output,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            faulthandler.dump_traceback_later(job.timeout_s, file=output)
            answer = _work(rank, num_ranks, job)
            faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


def _work(rank: int, num_ranks: int, job: _Job) -> tuple[bool, Any]:
    try:
        store = dist.FileStore(job.store, num_ranks)
        limit = timedelta(seconds=job.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
        try:
            torch.manual_seed(0)
            value = job.function(*job.args)
        finally:
            gc.collect()
            dist.destroy_process_group()
        left = _get_current_function_mode_stack()
        assert not left, f"{job.function.__qualname__} leaves {left} to the jobs after it: close the optimizer"
        return True, value
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        return False, traceback.format_exc()
