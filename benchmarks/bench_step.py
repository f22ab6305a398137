"""Time of a whole training step and of its optimizer part, and memory, for freehold and its peers on gloo ranks.

    python benchmarks/bench_step.py                        # about four minutes on two quiet cores
    python benchmarks/bench_step.py --quick                # half a minute: does it work
    python benchmarks/bench_step.py --rounds 8 --memory -o step.json

All systems live in the same processes and take turns, a block of consecutive steps each. See docs/benchmarks.md for
what is measured and how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_SYSTEMS = ("ddp-adamw", "ddp-muon", "zero-muon", "freehold")
_REFERENCE = "ddp-muon"
_LABELS = {
    "ddp-adamw": "DDP + torch.optim.AdamW",
    "ddp-muon": "DDP + torch.optim.Muon",
    "zero-muon": "DDP + ZeroRedundancyOptimizer(Muon)",
    "freehold": "freehold",
}
_MIB = 2**20


def main() -> None:
    """Start the ranks, read what they measured, print tables."""
    args = _parse()
    record = _launch(args, list(_SYSTEMS), rounds=args.rounds, steps=args.steps, split_steps=args.split_steps)
    record["setup"] = {name: value for name, value in vars(args).items() if name != "output"}
    print(_heading(args, record))
    for what, title in (
        ("step", "Whole step, seconds"),
        ("optimizer", "Optimizer, from the end of backward until all ranks have all new weights, seconds"),
        ("backward", "Forward and backward, seconds"),
    ):
        print(f"\n{title}\n\n" + "\n".join(_time_table(record["samples"], what)))
    print("\nMemory kept between steps, by rank, MiB\n\n" + "\n".join(_held_table(record["ranks"])))
    if args.memory:
        record["peak_growth_bytes"] = {name: _peak_growth(args, name) for name in _SYSTEMS}
        print("\nGrowth of peak resident memory, each system in processes of its own, by rank, MiB\n")
        print("\n".join(_peak_table(record["peak_growth_bytes"])))
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def _launch(
    args: argparse.Namespace, systems: list[str], *, rounds: int, steps: int, split_steps: int
) -> dict[str, Any]:
    """Run ``step_worker.py`` on all ranks and return what it wrote."""
    counts = {"rounds": rounds, "steps": steps, "split-steps": split_steps, "width": args.width, "heads": args.heads}
    counts |= {"layers": args.layers, "vocab": args.vocab, "seq-len": args.seq_len, "batch-size": args.batch_size}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "record.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command += [str(_HERE / "step_worker.py"), "--output", str(output), "--systems", *systems]
        command += [f"--{name}={count}" for name, count in counts.items()]
        command += ["--native-bf16"] if args.native_bf16 else []
        subprocess.run(command, check=True, env=_environment())
        return json.loads(output.read_text())


def _environment() -> dict[str, str]:
    """The ranks import the example's model, and freehold from this checkout unless it is installed."""
    paths = [str(_HERE.parent / "examples"), str(_HERE.parent / "src")]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _peak_growth(args: argparse.Namespace, system: str) -> list[int]:
    record = _launch(args, [system], rounds=1, steps=1, split_steps=0)
    return [rank["peak_growth_bytes"] for rank in record["ranks"]]


def _heading(args: argparse.Namespace, record: dict[str, Any]) -> str:
    products = "torch's own kernels" if args.native_bf16 else "float32 products rounded to bfloat16"
    return (
        f"GPT of width {args.width}, {args.layers} layers, vocabulary {args.vocab}: {record['num_params']:,} params, "
        f"float32; {args.batch_size} x {args.seq_len} tokens per rank\n"
        f"{args.ranks} gloo ranks of one thread; {args.rounds} rounds, blocks of {args.steps} steps; "
        f"Newton-Schulz by {products}"
    )


def _time_table(samples: list[dict[str, Any]], what: str) -> Iterable[str]:
    """Spread of each system, and the median over rounds of its ratio to the reference in the same round."""
    yield "| system | min | quartile | median | quartile | ratio to DDP + Muon |"
    yield "|---|---|---|---|---|---|"
    reference = _by_round(samples, _REFERENCE, what)
    for name in _SYSTEMS:
        rounds = _by_round(samples, name, what)
        seconds = sorted(sample for values in rounds.values() for sample in values)
        low, middle, high = _quartiles(seconds)
        ratio = statistics.median(
            statistics.median(values) / statistics.median(reference[index]) for index, values in rounds.items()
        )
        numbers = (seconds[0], low, middle, high)
        yield f"| {_LABELS[name]} | " + " | ".join(f"{s:.3f}" for s in numbers) + f" | {ratio:.2f} |"


def _by_round(samples: list[dict[str, Any]], system: str, what: str) -> dict[int, list[float]]:
    rounds: dict[int, list[float]] = {}
    for sample in samples:
        if sample["system"] == system and sample["what"] == what:
            rounds.setdefault(sample["round"], []).append(sample["seconds"])
    return rounds


def _quartiles(seconds: list[float]) -> list[float]:
    return statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3


def _held_table(ranks: list[dict[str, Any]]) -> Iterable[str]:
    yield "| system | weights | gradients | optimizer state | together |"
    yield "|---|---|---|---|---|"
    for name in _SYSTEMS:
        held = [rank["held_bytes"][name] for rank in ranks]
        columns = [_mib(item[key] for item in held) for key in ("weights", "gradients", "state")]
        total = _mib(sum(item.values()) for item in held)
        yield f"| {_LABELS[name]} | " + " | ".join(columns) + f" | {total} |"


def _peak_table(growth: dict[str, list[int]]) -> Iterable[str]:
    yield "| system | peak growth |"
    yield "|---|---|"
    for name, sizes in growth.items():
        yield f"| {_LABELS[name]} | {_mib(sizes)} |"


def _mib(sizes: Iterable[int]) -> str:
    """One figure if all ranks have the same, else one for each."""
    shown = [f"{size / _MIB:.0f}" for size in sizes]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="how often every system has its turn")
    parser.add_argument("--steps", type=int, default=2, help="consecutive steps of a turn, timed as one block")
    parser.add_argument("--split-steps", type=int, default=1, help="steps of a turn with the optimizer timed apart")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--memory", action="store_true", help="also each system alone, for its peak memory")
    parser.add_argument("--native-bf16", action="store_true", help="torch's own bfloat16 products (see the docs)")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it works")
    parser.add_argument("-o", "--output", type=Path, help="write all samples as JSON")
    args = parser.parse_args()
    if args.quick:
        args.width, args.layers, args.heads, args.vocab, args.seq_len = 128, 2, 4, 512, 64
    return args


if __name__ == "__main__":
    main()
