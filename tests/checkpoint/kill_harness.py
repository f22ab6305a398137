"""A program that saves checkpoints and is killed, many times over; run by ``test_kills.py`` in a process of its own.

Importing torch takes seconds, so one process imports it and forks: each fork is a fresh training run of one or two
ranks that resumes from ``latest``, saves after every step, and writes the step that ``save`` returned for into a log.
It is killed by SIGKILL, after a random time or at a random system call of saving. Then the parent compares what is
found with the log: nothing that was acknowledged is lost, and nothing that is found is damaged.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import freehold
from freehold import AdamW, LayerwiseOptimizer, Muon
from freehold.runtime.checkpoint.manifest import read_manifest
from freehold.runtime.checkpoint.tensor_file import hash_file

_SYSTEM_CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


def _build() -> tuple[nn.Sequential, LayerwiseOptimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 24))
    return net, LayerwiseOptimizer(net, matrix=Muon(), elementwise=AdamW(), bucket_numel=500)


def _train(root: Path, log: Path, *, asynchronous: bool) -> None:
    """Step and save until killed."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    net, opt = _build()
    path = freehold.latest(root)
    step = 0 if path is None else freehold.load(path, net, opt)["step"]
    check_weights(net, step)
    if rank == 0:
        (log.parent / "ready").touch()
    while True:
        step += 1
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(float(step))
        save: Callable[..., Any] = freehold.async_save if asynchronous else freehold.save
        done = save(root / f"step-{step}", net, opt, extra={"step": step}, keep=2)
        if asynchronous:
            done.wait()
        if rank == 0:
            with open(log, "a") as file:
                file.write(f"{step}\n")


def check_weights(net: nn.Module, step: int) -> None:
    """All weights are those of the step that the checkpoint claims."""
    for p in net.parameters():
        assert step == 0 or bool((p == float(step)).all()), f"weights of another step than {step}"


def _die_at(call: int) -> None:
    """Kill this process at its ``call``-th system call that changes files, before or in the middle of it."""
    left = [call]

    def dying(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapped

    for name in _SYSTEM_CALLS:
        setattr(os, name, dying(getattr(os, name), name))


def _fork(rank: int, num_ranks: int, folder: Path, seed: int, die_at: int | None) -> int:
    child = os.fork()
    if child:
        return child
    with open(folder / f"output-{rank}.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if num_ranks > 1:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        limit = timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    if die_at is not None and rank == seed % num_ranks:
        _die_at(die_at)
    try:
        _train(folder / "run", folder / "acknowledged.txt", asynchronous=seed % 3 == 0)
    except BaseException as error:  # the other rank died
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(1)


def one_round(folder: Path, seed: int, num_ranks: int) -> None:
    """Start ranks, kill them, and look at what is left."""
    random_ = random.Random(seed)
    by_call = random_.random() < 0.5
    (folder / "ready").unlink(missing_ok=True)
    (folder / "store").unlink(missing_ok=True)
    die_at = random_.randrange(1, 150) if by_call else None
    children = [_fork(rank, num_ranks, folder, seed, die_at) for rank in range(num_ranks)]
    deadline = time.monotonic() + 20
    if by_call:
        os.waitpid(children[seed % num_ranks], 0)
        children.pop(seed % num_ranks)
    else:
        while not (folder / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(random_.random() * 0.08)
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    inspect(folder)


def inspect(folder: Path) -> None:
    """Nothing acknowledged is lost; nothing half-written passes for a checkpoint."""
    log = folder / "acknowledged.txt"
    acknowledged = int(log.read_text().split()[-1]) if log.exists() else 0
    path = freehold.latest(folder / "run")
    found = 0 if path is None else int(path.name.removeprefix("step-"))
    assert acknowledged <= found, f"{acknowledged=} {found=}"
    for path in (folder / "run").glob("step-*"):
        for record in read_manifest(path).files:  # whatever has a checkpoint's name is one
            assert not hash_file(path, record), hash_file(path, record)
    if path is not None:
        net, opt = _build()
        latest = freehold.latest(folder / "run")
        check_weights(net, freehold.load(latest, net, opt)["step"])
        opt.close()


def main(folder: str, first: str, num_rounds: str) -> None:
    """Rounds of one and of two ranks."""
    torch.set_num_threads(1)
    for seed in range(int(first), int(first) + int(num_rounds)):
        num_ranks = 1 + seed % 2
        place = Path(folder, f"{num_ranks} ranks")
        (place / "run").mkdir(parents=True, exist_ok=True)
        try:
            one_round(place, seed, num_ranks)
        except BaseException:
            print(f"seed {seed}:", *(path.read_text()[-2000:] for path in place.glob("output-*.txt")), file=sys.stderr)
            raise
    for place in Path(folder).iterdir():
        log = place / "acknowledged.txt"
        print(f"{place.name}: {len(log.read_text().split()) if log.exists() else 0} saves acknowledged")


if __name__ == "__main__":
    main(*sys.argv[1:])
