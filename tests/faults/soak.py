"""A long run with everything in it, held against one that nothing ever happened to.

Segments of training follow each other, each in new processes: random numbers of ranks, bucket sizes and policies,
random windows, params that no rank or only some ranks use, saves of both kinds, and now and then a rank that is killed.
Each segment goes on from the newest complete checkpoint. After each, that checkpoint is loaded into one process and
compared bit for bit (weights, moments, step counters) with a run of one process that was never interrupted: it computes
every rank's gradients by itself, and adds them up in rank order, as the ranks do.

    python tests/faults/soak.py --minutes 30
    python tests/faults/soak.py --quick

The last line says how many steps, segments, kills and comparisons there were, and how much the memory of a rank grew
over 2,000 steps. Anything that is not as it should be ends it with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import freehold

BATCH = 12  # samples of a micro batch over all ranks: divides by 1, 2, 3 and 4
EXPERTS = 4
WIDTH = 16
TIMEOUT_S = 30.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "freehold.runtime", "soak"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One stretch of training in its own processes.

    Attributes:
        seed: Of the whole soak: decides data and windows.
        number: Of the segment: decides saves.
        num_ranks: Ranks.
        stop: Train up to this step.
        kill: ``(rank, step)`` that is killed there, or ``None``.
        save_every: Mean number of steps between saves.
        options: For ``LayerwiseOptimizer``.
    """

    seed: int
    number: int
    num_ranks: int
    stop: int
    kill: tuple[int, int] | None
    save_every: int
    options: dict[str, Any]


class SoakNet(nn.Module):
    """Experts that some batches do not reach, a branch that only the first samples take, a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.aside, self.dead = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, route: Tensor, first: bool) -> Tensor:
        h = torch.tanh(self.enter(x))
        out = h
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(route == number).flatten()
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(self.norm(h[rows]))))
        if first:
            out = out + self.aside(out)
        return self.leave(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a step is made of; follows from its number and the seed of the soak.

    Attributes:
        seed: Of its data.
        reached: The experts that it may reach.
        aside: Whether the first rank takes the branch aside.
        num_micro: Backwards in it.
    """

    seed: int
    reached: tuple[int, ...]
    aside: bool
    num_micro: int

    @classmethod
    def of(cls, seed: int, step: int) -> Window:
        """The window of a step."""
        rng = random.Random(f"{seed} window {step}")
        return cls(
            seed=(seed * 1_000_003 + step) * 8,
            reached=tuple(rng.sample(range(EXPERTS), rng.randint(1, EXPERTS))),
            aside=rng.random() < 0.5,
            num_micro=rng.choice((1, 1, 2, 3)),
        )

    def loss(self, model: nn.Module, micro: int, rank: int, num_ranks: int) -> Tensor:
        """The loss of one rank's part of a micro batch."""
        generator = torch.Generator().manual_seed(self.seed + micro)
        x = torch.randn(BATCH, 8, generator=generator)
        route = torch.tensor(self.reached)[torch.randint(len(self.reached), (BATCH,), generator=generator)]
        part = slice(rank * BATCH // num_ranks, (rank + 1) * BATCH // num_ranks)
        return model(x[part], route[part], self.aside and rank == 0).square().mean()


def make_optimizer(model: nn.Module, **options: Any) -> freehold.LayerwiseOptimizer:
    """The optimizer of all runs."""
    return freehold.LayerwiseOptimizer(
        model, matrix=freehold.Muon(lr=0.01), elementwise=freehold.AdamW(lr=1e-3), **options
    )


def set_rates(opt: freehold.LayerwiseOptimizer, step: int) -> None:
    """A learning-rate schedule."""
    for group in opt.param_groups:
        group["lr"] = (0.01 if group["rule"] == "matrix" else 1e-3) * (1.0 + 0.5 * math.sin(step / 50))


# ---- the ranks ----


def run_rank(rank: int, segment: Segment, folder: str, results: Any) -> None:
    """Train one segment on one rank; puts ``(rank, steps, resident bytes by step)``, or what ended it."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store{segment.number}"), segment.num_ranks)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=segment.num_ranks, timeout=limit)
    torch.manual_seed(segment.number * 10 + rank)  # weights that are nowhere right before load
    model = SoakNet()
    opt = make_optimizer(model, timeout_s=TIMEOUT_S, **segment.options)
    try:
        sizes = _train(model, opt, segment, os.path.join(folder, "checkpoints"))
        results.put((rank, "", sizes))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}", {}))
    opt.close()
    dist.destroy_process_group()


def _train(model: nn.Module, opt: freehold.LayerwiseOptimizer, segment: Segment, root: str) -> dict[int, int]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    first = freehold.load(freehold.latest(root), model, opt)["step"]
    saves, sizes = random.Random(f"{segment.seed} saves {segment.number}"), dict[int, int]()
    for step in range(first, segment.stop):
        set_rates(opt, step)
        if step % 100 == 0:
            sizes[step] = resident_bytes()
        window = Window.of(segment.seed, step)
        for micro in range(window.num_micro):
            with contextlib.nullcontext() if micro == window.num_micro - 1 else opt.no_sync():
                window.loss(model, micro, rank, num_ranks).backward()
            if segment.kill == (rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
        opt.step()
        opt.zero_grad()
        drawn = saves.random()
        if step + 1 < segment.stop and drawn < 1.0 / segment.save_every:
            save = freehold.save if drawn < 0.5 / segment.save_every else freehold.async_save
            save(f"{root}/step-{step + 1}", model, opt, extra={"step": step + 1}, keep=3)
    freehold.save(f"{root}/step-{segment.stop}", model, opt, extra={"step": segment.stop}, keep=3)
    sizes[segment.stop] = resident_bytes()
    return sizes


def resident_bytes() -> int:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- the run that nothing happens to ----


class Reference:
    """One process that plays all ranks: their gradients one after the other, added up in rank order."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed, self.step = seed, 0
        self.model = SoakNet()
        self.plain = SoakNet()
        self.opt = make_optimizer(self.model)

    def advance(self, stop: int, num_ranks: int) -> None:
        """Train up to a step as so many ranks do."""
        for step in range(self.step, stop):
            set_rates(self.opt, step)
            self.plain.load_state_dict(self.model.state_dict())
            total: dict[str, Tensor] = {}
            used: set[str] = set()
            for rank in range(num_ranks):
                self.plain.zero_grad()
                window = Window.of(self.seed, step)
                for micro in range(window.num_micro):
                    window.loss(self.plain, micro, rank, num_ranks).backward()
                for name, p in self.plain.named_parameters():
                    grad = torch.zeros_like(p) if p.grad is None else p.grad
                    used |= set() if p.grad is None else {name}
                    total[name] = total[name] + grad if rank else grad.clone()
            for name, p in self.model.named_parameters():
                p.grad = total[name] / num_ranks if name in used else None
            self.opt.step()
            self.opt.zero_grad()
        self.step = max(self.step, stop)

    def compare(self, path: Path) -> None:
        """The checkpoint, loaded into one process, holds the same bits."""
        model = SoakNet()
        opt = make_optimizer(model)
        step = freehold.load(path, model, opt)["step"]
        assert step == self.step, f"{path} is of step {step}, not {self.step}"
        found, expected = state_of(opt), state_of(self.opt)
        differing = [key for key in expected if not torch.equal(found[key], expected[key])]
        assert not differing, f"after {step} steps: {differing} differ from the run that was never interrupted"
        opt.close()


def state_of(opt: freehold.LayerwiseOptimizer) -> dict[str, Tensor]:
    """All tensors of a one-process optimizer."""
    opt.synchronize()
    found = {"steps": torch.tensor([p.num_steps for p in opt._params])}
    for bucket in opt._buckets:
        memory = bucket.memory
        found |= {f"{bucket.index} weights": memory.weights, f"{bucket.index} masters": memory.master}
        for table in (memory.state, memory.row_state):
            found |= {f"{bucket.index} {name}": tensor for name, tensor in table.items()}
    return found


# ---- the soak ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a soak did."""

    steps: int
    replayed: int
    segments: int
    kills: int
    growth: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.segments} segments, {self.kills} kills, {self.replayed} steps replayed, "
            f"{self.segments} comparisons equal bit for bit; resident memory grew by {100 * self.growth:.3f} % over "
            f"the longest segment; {self.seconds:.0f} s"
        )


def soak(seed: int, seconds: float, long_steps: int, folder: str) -> Summary:
    """Run segments until the time is up; the first is the long one, whose memory is measured."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks do: with more, torch adds up in another order
    try:
        return _soak(seed, seconds, long_steps, folder)
    finally:
        torch.set_num_threads(num_threads)


def _soak(seed: int, seconds: float, long_steps: int, folder: str) -> Summary:
    began, rng, reference = time.monotonic(), random.Random(seed), Reference(seed)
    root = Path(folder, "checkpoints")
    freehold.save(root / "step-0", reference.model, reference.opt, extra={"step": 0})
    number = kills = replayed = 0
    growth = 0.0
    while number == 0 or time.monotonic() - began < seconds:
        segment = _draw(rng, seed, number, reference.step)
        if number == 0:
            segment = replace(segment, num_ranks=2, stop=long_steps, kill=None, save_every=200)
        sizes = _run(segment, folder)
        path = freehold.latest(root)
        assert path is not None
        step = int(path.name.removeprefix("step-"))
        reference.advance(step, segment.num_ranks)
        reference.compare(path)
        if segment.kill is None:
            assert step == segment.stop, f"{segment} left {path}"
        else:
            kills, replayed = kills + 1, replayed + segment.kill[1] - step
        if number == 0:
            growth = max(_growth(by_step) for by_step in sizes)
        number += 1
        print(f"{time.monotonic() - began:6.0f} s  step {step:>6}  {segment}", flush=True)
    return Summary(
        steps=reference.step,
        replayed=replayed,
        segments=number,
        kills=kills,
        growth=growth,
        seconds=time.monotonic() - began,
    )


def _draw(rng: random.Random, seed: int, number: int, first: int) -> Segment:
    num_ranks = rng.choice((1, 2, 3, 4))
    stop = first + rng.randint(30, 150)
    options = {
        "bucket_numel": rng.choice((1, 300, 1000, None)),
        "policy": rng.choice(("packed", "absorb", "threshold", "ns_cost")),
        "overlap": rng.random() < 0.7,
        "grad_memory": rng.choice(("full", "sharded")),
    }
    kills = num_ranks > 1 and rng.random() < 0.4
    kill = (rng.randrange(num_ranks), rng.randrange(first, stop)) if kills else None
    return Segment(seed=seed, number=number, num_ranks=num_ranks, stop=stop, kill=kill, save_every=20, options=options)


def _run(segment: Segment, folder: str) -> list[dict[int, int]]:
    results = _context.Queue()
    processes = [
        _context.Process(target=run_rank, args=(rank, segment, folder, results), daemon=True)
        for rank in range(segment.num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        expected = segment.num_ranks - (segment.kill is not None)
        answers = [results.get(timeout=600) for _ in range(expected)]
        for process in processes:
            process.join(60)
            assert not process.is_alive(), f"a rank of {segment} does not end"
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, error, _ in answers:
        if segment.kill is None:
            assert not error, f"rank {rank} of {segment}: {error}"
        else:
            assert error.startswith("PeerError"), f"rank {rank} of {segment}: {error or 'no error'}"
    return [sizes for _, _, sizes in answers]


def _growth(by_step: dict[int, int]) -> float:
    """Growth from step 200, when pools and caches are filled, to the end."""
    steps = sorted(step for step in by_step if step >= 200)
    return by_step[steps[-1]] / by_step[steps[0]] - 1.0 if len(steps) > 1 else 0.0


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="one minute, a short first segment")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            summary = soak(args.seed, 60.0, 600, folder)
        else:
            summary = soak(args.seed, 60.0 * args.minutes, 2200, folder)
    print(summary)
    sys.exit(0 if summary.growth < 0.01 else 1)


if __name__ == "__main__":
    main()
