"""Ranks that train until one of them is killed, stopped, or fails; what the others say of it, and how soon.

Ranks are forked from a server that has imported torch, so that a run takes a second or two. Everything about a run
follows from its seed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from freehold import AdamW, LayerwiseOptimizer, Muon

TIMEOUT_S = 4.0
GRACE_S = 5.0
POINTS = ("forward", "backward", "accumulate", "update", "gather", "loop", "clip")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "freehold.runtime", "fault_world"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A run and what goes wrong in it.

    Attributes:
        kind: ``"kill"``, ``"stop"`` or ``"pause"`` (stopped until the others have ended), ``"raise"``,
            ``"leave"`` (the loop), ``"collective"`` (one of its own), ``"zero_grad"`` (and no backward).
        point: Where the victim is hit: one of ``POINTS``.
        victim: Its rank.
        step: In which step.
        num_ranks: Ranks.
        store: ``"file"``, or ``"tcp"``, which lives on rank 0 and dies with it.
        together: Whether the loop runs inside ``failing_together``.
        options: For ``LayerwiseOptimizer``.
        micro_batches: Backwards a window; all but the last in ``no_sync``.
    """

    kind: str
    point: str
    victim: int
    step: int
    num_ranks: int
    store: str
    together: bool
    options: dict[str, Any]
    micro_batches: int


def draw(seed: int, kind: str) -> Fault:
    """The fault of a seed."""
    rng = random.Random(f"{kind} {seed}")
    num_ranks = rng.choice((2, 3, 4))
    return Fault(
        kind=kind,
        point=POINTS[seed % len(POINTS)] if kind in ("kill", "stop", "pause", "raise") else "loop",
        victim=rng.randrange(num_ranks),
        step=rng.randrange(1, 6),
        num_ranks=num_ranks,
        store=rng.choice(("file", "tcp")),
        together=kind == "raise" or rng.random() < 0.5,
        options={
            "bucket_numel": rng.choice((1, 300, 3000, None)),
            "overlap": rng.random() < 0.7,
            "grad_memory": rng.choice(("full", "sharded")),
        },
        micro_batches=rng.choice((1, 1, 2, 3)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a rank that was not hit.

    Attributes:
        rank: Which.
        error: Type of what ended its loop.
        text: Its text.
        again: Type of what the next ``step`` raised.
        after_s: Seconds from the fault to the error.
        ended_s: Seconds from the fault to the end of the process; ``None`` if it had to be killed.
    """

    rank: int
    error: str
    text: str
    again: str
    after_s: float
    ended_s: float | None


def run_fault(fault: Fault) -> list[Outcome]:
    """Let it happen; one outcome for every rank but the victim, and for that too if it was only paused."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = range(fault.num_ranks)
        processes = [_context.Process(target=_rank, args=(r, fault, folder, port), daemon=True) for r in ranks]
        for process in processes:
            process.start()
        try:
            hit_at = _hit_at(Path(folder, "hit"), processes)
            ended = _wait_for_ends(processes, fault.victim, hit_at)
            outcomes = [_outcome(Path(folder), rank, hit_at, ended[rank]) for rank in ended]
            if fault.kind == "pause":
                outcomes.append(_resumed(processes[fault.victim], Path(folder), fault.victim))
            return outcomes
        finally:
            for process in processes:
                process.kill()  # one that is stopped too
                process.join()


def _hit_at(path: Path, processes: list[Any]) -> float:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):
            return float(path.read_text())
        if all(not process.is_alive() for process in processes):
            break
        time.sleep(0.02)
    raise AssertionError("the fault did not happen: " + " | ".join(p.read_text() for p in path.parent.glob("rank*")))


def _wait_for_ends(processes: list[Any], victim: int, hit_at: float) -> dict[int, float | None]:
    until = time.monotonic() + TIMEOUT_S + GRACE_S + 10.0
    ended: dict[int, float | None] = {}
    for rank, process in enumerate(processes):
        if rank != victim:
            process.join(max(0.1, until - time.monotonic()))
            ended[rank] = None if process.is_alive() else time.time() - hit_at  # joined in turn: an upper bound
    return ended


def _resumed(process: Any, folder: Path, rank: int) -> Outcome:
    resumed_at = time.time()
    os.kill(process.pid, signal.SIGCONT)
    process.join(TIMEOUT_S + GRACE_S)
    ended_s = None if process.is_alive() else time.time() - resumed_at
    return _outcome(folder, rank, resumed_at, ended_s)


def _outcome(folder: Path, rank: int, hit_at: float, ended_s: float | None) -> Outcome:
    path = folder / f"rank{rank}"
    if not path.exists():
        return Outcome(rank=rank, error="nothing", text="", again="", after_s=float("inf"), ended_s=ended_s)
    found = json.loads(path.read_text())
    after_s = found.pop("at") - hit_at
    return Outcome(rank=rank, after_s=after_s, ended_s=ended_s, **found)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# ---- what runs on the ranks ----


class HitError(Exception):
    """What a rank that fails of itself raises."""


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _rank(rank: int, fault: Fault, folder: str, port: int) -> None:
    with open(os.path.join(folder, f"output{rank}"), "w") as output:
        os.dup2(output.fileno(), 2)  # gloo and TCPStore write there
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    if fault.store == "file":
        store: Any = dist.FileStore(os.path.join(folder, "store"), fault.num_ranks)
    else:
        store = dist.TCPStore("127.0.0.1", port, fault.num_ranks, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=fault.num_ranks, timeout=limit)
    torch.manual_seed(0)
    model = nn.Sequential(*[_Layer(16) for _ in range(4)])
    opt = LayerwiseOptimizer(
        model, matrix=Muon(lr=0.01), elementwise=AdamW(lr=1e-3), timeout_s=TIMEOUT_S, **fault.options
    )
    trigger = _Trigger(fault, folder, opt) if rank == fault.victim else None
    try:
        with opt.failing_together() if fault.together else contextlib.nullcontext():
            _train(model, opt, fault, trigger)
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error), "at": time.time(), "again": ""}
        try:
            opt.step()
        except Exception as second:
            found["again"] = type(second).__name__
        _write(os.path.join(folder, f"rank{rank}"), json.dumps(found))
        opt.close()
    dist.destroy_process_group()


def _write(path: str, text: str) -> None:
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)


def _train(model: nn.Module, opt: LayerwiseOptimizer, fault: Fault, trigger: _Trigger | None) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(10_000):
        if trigger is not None:
            trigger.begin_step(step)
            if trigger.leaves():
                return
        for micro in range(fault.micro_batches):
            last = micro == fault.micro_batches - 1
            with contextlib.nullcontext() if last else opt.no_sync():
                model(torch.randn(3, 16, generator=generator)).square().mean().backward()
        opt.clip_grad_norm_(1.0)
        if trigger is not None:
            trigger.reach("clip")
        opt.step()
        if trigger is not None:
            trigger.reach("gather")
        opt.zero_grad()


class _Trigger:
    """Sits in the victim and goes off once, at its point of its step."""

    def __init__(self, fault: Fault, folder: str, opt: LayerwiseOptimizer) -> None:
        self._fault, self._folder, self._opt = fault, folder, opt
        self._step = -1
        model_layers = next(m for m in _modules(opt) if isinstance(m, nn.Sequential))
        middle = model_layers[2]
        middle.register_forward_pre_hook(lambda module, args: self.reach("forward"))
        middle.register_full_backward_hook(lambda module, grad_in, grad_out: self.reach("backward"))
        middle.up.weight.register_post_accumulate_grad_hook(lambda p: self.reach("accumulate"))
        gatherer, launch = opt._gatherer, opt._gatherer.launch

        def launch_one(bucket: Any) -> None:
            launch(bucket)
            self.reach("update")

        gatherer.launch = launch_one  # type: ignore[method-assign]

    def begin_step(self, step: int) -> None:
        self._step = step
        if step == self._fault.step and self._fault.kind == "collective":
            self._note()
            dist.barrier()
        if step == self._fault.step and self._fault.kind == "zero_grad":
            self._note()
            while True:
                self._opt.zero_grad()
                time.sleep(0.01)
        if self._fault.kind in ("kill", "stop", "pause", "raise"):
            self.reach("loop")

    def leaves(self) -> bool:
        if self._fault.kind == "leave" and self._step == self._fault.step:
            self._note()
            time.sleep(TIMEOUT_S + GRACE_S + 5.0)
            return True
        return False

    def reach(self, point: str) -> None:
        if self._step != self._fault.step or point != self._fault.point:
            return
        self._step = -1
        self._note()
        if self._fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault.kind in ("stop", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)
            if self._fault.kind == "pause":
                return
        raise HitError(f"bad luck in {point}")

    def _note(self) -> None:
        _write(os.path.join(self._folder, "hit"), repr(time.time()))


def _modules(opt: LayerwiseOptimizer) -> Any:
    module = opt._blueprint.module
    assert module is not None
    return module.modules()
