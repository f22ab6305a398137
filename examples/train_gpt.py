"""Train a small GPT on source code with freehold, or with DDP for comparison.

    torchrun --nproc-per-node 2 examples/train_gpt.py                  # two ranks on CPUs, or one per GPU
    torchrun --nproc-per-node 2 examples/train_gpt.py --check          # and prove it equal to DDP + torch.optim.Muon
    python examples/train_gpt.py --data my_texts/ --steps 500          # one rank, your own text
    torchrun --nproc-per-node 2 examples/train_gpt.py --save-every 50  # checkpoints; go on after a crash with --resume

The text is bytes (no tokenizer); by default that of Python's own standard library, with one file in 16 held out.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from corpus import Batch, Corpus, load_corpus, sample_batch, validation_batches
from freehold import LayerwiseOptimizer
from gpt import GPT, GPTConfig
from progress import Progress, resume, save
from report import RunResult, layout_lines, picture_lines, result_lines, row, say
from stopwatch import Stopwatch
from systems import SYSTEM_NAMES, OptimizerOptions, System, build_system

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tolerance:
    """How far freehold's losses may lie from those of DDP where equal bits cannot be expected, in nats.

    A difference in the last bit grows from step to step, whatever its cause, because Newton-Schulz rounds to bfloat16.
    So single losses are compared over the first steps, and all steps by their mean, in which such noise averages out.
    """

    early: float
    mean: float


_NUM_EARLY = 20

# float32: sums over more than two ranks, clipped norms and GPU kernels add up in another order. bfloat16: DDP averages
# gradients and keeps weights in bfloat16, freehold does both in float32; the reference is the less exact of the two.
_TOLERANCES = {"float32": _Tolerance(early=2e-3, mean=0.01), "bfloat16": _Tolerance(early=0.1, mean=0.2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The command line, see ``--help``."""

    optimizer: str
    check: int | None
    data: Path | None
    max_bytes: int
    steps: int
    accumulate: int
    batch_size: int
    seq_len: int
    valid_batches: int
    width: int
    layers: int
    heads: int
    fused_qkv: bool
    tied_head: bool
    matrix_lr: float
    method: str
    lr: float
    weight_decay: float
    warmup: int
    clip: float
    dtype: str
    device: str
    threads: int | None
    seed: int
    checkpoints: Path
    save_every: int
    resume: bool
    picture: Path | None


def main(argv: list[str] | None = None) -> int:
    """Parse, train, report; the exit status is 1 if ``--check`` found a difference."""
    options = _parse(argv)
    device = _start_process_group(options)
    try:
        return _train_and_report(options, device)
    finally:
        # A DDP that outlives the group destroys it while holding the GIL, for which gloo's worker threads may wait: a
        # deadlock (pytorch issue 56297), or, at the end of the interpreter, an abort. Collect what is left of it.
        gc.collect()
        dist.destroy_process_group()


def _train_and_report(options: TrainOptions, device: torch.device) -> int:
    corpus = load_corpus(options.data, max_bytes=options.max_bytes)
    say(
        row("text", f"{corpus.source}: {corpus.train.numel():,} bytes, and {corpus.valid.numel():,} held out"),
        row("ranks", f"{dist.get_world_size()} on {device.type}, {torch.get_num_threads()} threads each"),
    )
    reference = None
    if options.check is not None:
        reference = _run("ddp-muon", options, device, corpus, num_steps=options.check or options.steps)
    result = _run(options.optimizer, options, device, corpus, num_steps=options.steps)
    lines = result_lines(result)
    say(*lines)
    return 0 if reference is None else _compare(options, device, reference.losses, result.losses)


def _run(name: str, options: TrainOptions, device: torch.device, corpus: Corpus, *, num_steps: int) -> RunResult:
    """Build model and optimizer anew, train, validate."""
    system = build_system(name, _build_model(options, device), _optimizer_options(options))
    layout = None
    if isinstance(system.optimizers[0], LayerwiseOptimizer):
        layout = system.optimizers[0].layout
        say(*layout_lines(layout))
        if options.picture is not None:
            say(*picture_lines(layout, options.picture))
    schedulers = [LambdaLR(optimizer, _warmup_cosine(options)) for optimizer in system.optimizers]
    stopwatch, step_s, progress = Stopwatch(device), list[float](), Progress()
    if options.resume:
        progress = resume(options.checkpoints, system.model, _freehold_of(system), schedulers)
        say(row("resumed after", f"{progress.num_steps} steps"))
        if progress.num_steps >= num_steps:
            raise SystemExit(f"all {num_steps} steps are done: nothing is left to train")
    first = progress.num_steps
    with tqdm(total=num_steps, initial=first, desc=name, disable=dist.get_rank() != 0, mininterval=1.0) as bar:
        for step in range(first, num_steps):
            start_s = time.perf_counter()
            progress.losses.append(_train_step(system, options, corpus.train, step, stopwatch))
            for scheduler in schedulers:
                scheduler.step()
            if name == "freehold" and options.save_every and (step + 1) % options.save_every == 0:
                save(options.checkpoints, system.model, _freehold_of(system), schedulers, progress)
            step_s.append(time.perf_counter() - start_s)
            rate = _bytes_per_step(options) / step_s[-1]
            bar.set_postfix_str(f"loss {progress.losses[-1]:.3f}, {rate:,.0f} tokens/s", refresh=False)
            bar.update()
    bits_per_byte = _validate(system.model, options, device, corpus.valid)
    held = system.state_bytes()
    system.close()
    return RunResult(
        system=name,
        losses=progress.losses,
        step_s=step_s,
        optimizer_step_s=stopwatch.seconds(),
        bits_per_byte=bits_per_byte,
        held=held,
        layout=layout,
    )


def _freehold_of(system: System) -> LayerwiseOptimizer:
    (optimizer,) = system.optimizers
    assert isinstance(optimizer, LayerwiseOptimizer), "only freehold is saved and resumed"
    return optimizer


def _train_step(system: System, options: TrainOptions, text: Tensor, step: int, stopwatch: Stopwatch) -> float:
    """One update from ``accumulate`` backward passes; returns this rank's mean loss."""
    device = next(system.model.parameters()).device
    total = torch.zeros((), device=device)
    for part in range(options.accumulate):
        batch = _batch(options, text, step * options.accumulate + part)
        is_last = part == options.accumulate - 1
        # Gradients only add up on this rank until the last part, whose backward reduces the sums over the ranks.
        with nullcontext() if is_last else system.no_sync():
            loss = _loss(system.forward, batch, device) / options.accumulate
            loss.backward()
        total += loss.detach()
    if options.clip:
        system.clip_grad_norm(options.clip)
    with stopwatch:
        system.step()
    system.zero_grad()
    return total.item()


def _batch(options: TrainOptions, text: Tensor, position: int) -> Batch:
    """Depends on seed, position and rank alone, so every system sees the same bytes."""
    seed = (options.seed * 1_000_003 + position) * dist.get_world_size() + dist.get_rank()
    return sample_batch(text, batch_size=options.batch_size, seq_len=options.seq_len, seed=seed)


def _loss(forward: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Mean cross entropy in nats per byte, a float32 scalar."""
    logits = forward(batch.tokens.to(device))
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.to(device).flatten())


@torch.no_grad()
def _validate(model: nn.Module, options: TrainOptions, device: torch.device, text: Tensor) -> float:
    """Bits per byte on held-out text; each rank takes every num_ranks-th batch."""
    num_batches = options.valid_batches
    batches = validation_batches(text, num_batches=num_batches, batch_size=options.batch_size, seq_len=options.seq_len)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches[dist.get_rank() :: dist.get_world_size()]:
        total += _loss(model, batch, device)
    dist.all_reduce(total)
    return total.item() / num_batches / math.log(2)


def _compare(options: TrainOptions, device: torch.device, expected: list[float], got: list[float]) -> int:
    """Compare the losses of all ranks; the verdict is the same on every rank."""
    mine = [(a, b) for a, b in zip(expected, got, strict=False)]  # freehold may have been trained for longer
    of_all_ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, mine)
    equal = all(a == b for losses in of_all_ranks for a, b in losses)
    # Two addends have one sum, three have several; a clipped norm and GPU kernels add up in an order of their own.
    exact = device.type == "cpu" and options.dtype == "float32" and len(of_all_ranks) <= 2 and not options.clip
    allowed = _Tolerance(early=0.0, mean=0.0) if exact else _TOLERANCES[options.dtype]
    early = max(abs(a - b) for losses in of_all_ranks for a, b in losses[:_NUM_EARLY])
    mean = abs(statistics.fmean(a - b for losses in of_all_ranks for a, b in losses))
    # A NaN makes the mean one, and is within no tolerance.
    passed = equal or (not exact and early <= allowed.early and mean <= allowed.mean)
    found = (
        "are bit-equal"
        if equal
        else (
            f"differ by up to {early:.2g} nats in the first {_NUM_EARLY} steps (allowed: {allowed.early:g}), "
            f"by {mean:.2g} on average over all (allowed: {allowed.mean:g})"
        )
    )
    where = f"{len(mine)} losses of each of {len(of_all_ranks)} ranks"
    say(f"check {'passed' if passed else 'FAILED'}: {where}, freehold against ddp-muon, {found}")
    return 0 if passed else 1


def _build_model(options: TrainOptions, device: torch.device) -> GPT:
    torch.manual_seed(options.seed)
    config = GPTConfig(
        width=options.width,
        num_layers=options.layers,
        num_heads=options.heads,
        fused_qkv=options.fused_qkv,
        tied_head=options.tied_head,
    )
    return GPT(config).to(device=device, dtype=_DTYPES[options.dtype])


def _optimizer_options(options: TrainOptions) -> OptimizerOptions:
    return OptimizerOptions(
        matrix_lr=options.matrix_lr, lr=options.lr, weight_decay=options.weight_decay, method=options.method
    )


@dataclass(frozen=True)  # without slots: LambdaLR.state_dict() asks for its __dict__
class _WarmupCosine:
    """Factor of the learning rate: up to 1 over ``warmup`` steps, then along half a cosine to a tenth."""

    warmup: int
    steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))


def _warmup_cosine(options: TrainOptions) -> _WarmupCosine:
    return _WarmupCosine(warmup=options.warmup, steps=options.steps)


def _bytes_per_step(options: TrainOptions) -> int:
    return options.batch_size * options.seq_len * options.accumulate * dist.get_world_size()


def _start_process_group(options: TrainOptions) -> torch.device:
    """Join the ranks that torchrun started, or be the only one; NCCL if every local rank has a GPU, else gloo."""
    device = _device(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu" or options.threads is not None:
        torch.set_num_threads(options.threads or 1)
    alone = (
        {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # pyright: ignore
    )
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **alone)
    else:
        dist.init_process_group("gloo", **alone)
    return device


def _device(options: TrainOptions) -> torch.device:
    """The GPU of this local rank if each has one, else the CPU; what ``--device`` asks for, or an error."""
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= num_local_ranks
    if options.device == "cuda" and not enough:
        raise SystemExit(f"--device cuda: {num_local_ranks} GPUs wanted, {torch.cuda.device_count()} found")
    if options.device == "cpu" or not enough:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _parse(argv: list[str] | None) -> TrainOptions:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--optimizer", choices=SYSTEM_NAMES, default="freehold", help="what to train with (default: freehold)")
    add(
        "--check",
        nargs="?",
        type=_positive,
        const=0,
        metavar="K",
        help="train ddp-muon first, for K steps (default: all), and fail unless freehold's losses are the same",
    )
    _add_run_arguments(parser)
    _add_model_arguments(parser)
    options = TrainOptions(**vars(parser.parse_args(argv)))
    if options.check is not None and options.optimizer != "freehold":
        parser.error("--check compares freehold with ddp-muon: leave out --optimizer")
    if (options.save_every or options.resume) and (options.optimizer != "freehold" or options.check is not None):
        parser.error("--save-every and --resume are for training with freehold, without --check")
    if options.check is not None and options.check > options.steps:
        parser.error(f"--check {options.check}: there are only {options.steps} steps")
    return options


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument("--data", type=Path, help="file or folder of text (default: Python's standard library)")
    run.add_argument("--max-bytes", type=_positive, default=4 * 2**20, help="read no more text than this")
    run.add_argument("--steps", type=_positive, default=300, help="optimizer steps")
    run.add_argument("--accumulate", type=_positive, default=1, metavar="K", help="backward passes per step")
    run.add_argument("--batch-size", type=_positive, default=4, help="sequences per rank and backward pass")
    run.add_argument("--valid-batches", type=_positive, default=32, help="held-out batches to validate on")
    run.add_argument("--matrix-lr", type=float, default=0.05, help="learning rate of Muon")
    run.add_argument("--method", choices=("standard", "gram", "auto"), default="standard", help="of Newton-Schulz")
    run.add_argument("--lr", type=float, default=6e-3, help="learning rate of AdamW")
    run.add_argument("--weight-decay", type=float, default=0.01, help="of AdamW; norms have none")
    run.add_argument("--warmup", type=int, default=10, help="steps over which learning rates rise")
    run.add_argument("--clip", type=float, default=0.0, metavar="NORM", help="clip gradients (default: 0, do not)")
    run.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="of weights and activations")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs if enough")
    run.add_argument("--threads", type=_positive, help="torch threads per rank (default: 1 on CPUs)")
    run.add_argument("--seed", type=int, default=0, help="of weights and batches")
    run.add_argument("--save-every", type=_positive, default=0, metavar="K", help="save a checkpoint every K steps")
    run.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), metavar="DIR", help="where to save them")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint there, if there is one")
    run.add_argument("--picture", type=Path, metavar="FILE", help="write the layout as a page to look at (.html)")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--width", type=_positive, default=96, help="of the residual stream")
    model.add_argument("--layers", type=_positive, default=4)
    model.add_argument("--heads", type=_positive, default=4)
    model.add_argument("--seq-len", type=_positive, default=256, help="bytes of context")
    model.add_argument("--fused-qkv", action="store_true", help="one matrix for query, key and value")
    model.add_argument("--tied-head", action="store_true", help="the head is the embedding")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
