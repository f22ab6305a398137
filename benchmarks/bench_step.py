"""Time of a whole training step and of its optimizer part, and memory, for freehold and its peers on gloo ranks.

    python benchmarks/bench_step.py                          # all models and dtypes
    python benchmarks/bench_step.py gpt-float32 --rounds 8 -o step.json
    python benchmarks/bench_step.py gpt-float32 --memory     # peak memory instead of times
    python benchmarks/bench_step.py --quick                  # small models, a minute: does it work
    python benchmarks/bench_step.py --write docs/benchmarks.md

All systems live in the same processes and take turns, a block of consecutive steps each. See docs/benchmarks.md for
what is measured and how to read the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path += [str(_HERE.parent / "examples"), str(_HERE.parent / "src")]

from markdown_blocks import replace_block  # noqa: E402
from step_models import CASES  # noqa: E402  the models are those of the example
from step_systems import SYSTEM_NAMES, default_systems  # noqa: E402
from step_tables import memory_table, products_line, time_table  # noqa: E402

_QUICK_CASES = ("gpt-float32", "moe-stacks-bfloat16")


def main() -> None:
    """Start the ranks for one case after the other, read what they measured, print tables."""
    args = _parse()
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        _run(args, Path(folder))
    print(f"\n{time.perf_counter() - begin_s:.0f} s in all")


def _run(args: argparse.Namespace, folder: Path) -> None:
    records: dict[str, Any] = {}
    for case in args.cases:
        records[case], lines = _memory(args, case, folder) if args.memory else _times(args, case, folder)
        print(f"\n## {CASES[case].title}\n", *lines, sep="\n", flush=True)
        if args.write is not None:
            replace_block(args.write, f"bench_step {case}" + "-memory" * args.memory, lines)
        if args.output is not None:
            args.output.write_text(json.dumps(records, indent=1) + "\n")


def _times(args: argparse.Namespace, case: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    record = _launch(args, case, _systems(args, case), folder)
    rounds = 1 + max(sample["round"] for sample in record["samples"])
    heading = (
        f"{record['num_params']:,} params; {args.ranks} gloo ranks of one thread; {rounds} rounds, blocks of "
        f"{args.steps} steps. {products_line(record)}."
    )
    return record, [heading, "", *time_table(record)]


def _memory(args: argparse.Namespace, case: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    records = {name: _launch(args, case, [name], folder) for name in _systems(args, case)}
    return records, [
        "MiB, by rank where ranks differ; each system in processes of its own.",
        "",
        *memory_table(records),
    ]


def _systems(args: argparse.Namespace, case: str) -> list[str]:
    return args.systems or default_systems(CASES[case].dtype, memory=args.memory)


def _launch(args: argparse.Namespace, case: str, systems: list[str], folder: Path) -> dict[str, Any]:
    """Run ``step_worker.py`` on all ranks and return what it wrote; ``folder`` is for files that come and go."""
    output = folder / "record.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += [str(_HERE / "step_worker.py"), "--output", str(output), "--systems", *systems]
    command += [f"--case={case}", f"--products={args.products}", f"--rounds={args.rounds}", f"--seconds={args.seconds}"]
    command += [f"--steps={args.steps}", f"--split-steps={args.split_steps}"]
    command += ["--quick"] * args.quick + ["--alone"] * args.memory
    subprocess.run(command, check=True, env=_environment(folder))
    return json.loads(output.read_text())


def _environment(folder: Path) -> dict[str, str]:
    """The ranks import the example's model, and freehold from this checkout unless it is installed."""
    paths = [str(_HERE.parent / "examples"), str(_HERE.parent / "src")]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    # A system that compiles does so, and finds nothing in a cache of earlier runs; no compile workers stay behind.
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return os.environ | inductor | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--systems", nargs="+", choices=SYSTEM_NAMES, help="which; see the docs for the default")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="how often every system has its turn")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="further rounds until a case has been timed so long"
    )
    parser.add_argument("--steps", type=int, default=2, help="consecutive steps of a turn, timed as one block")
    parser.add_argument("--split-steps", type=int, default=1, help="steps of a turn with the optimizer timed apart")
    parser.add_argument("--memory", action="store_true", help="peak memory of each system alone, instead of times")
    parser.add_argument("--products", choices=("auto", "native", "float32"), default="auto", help="see the docs")
    parser.add_argument("--quick", action="store_true", help="small models and few rounds, to see that it works")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in this Markdown file")
    parser.add_argument("-o", "--output", type=Path, help="write all samples as JSON")
    args = parser.parse_args()
    unknown = [case for case in args.cases if case not in CASES]
    if unknown:
        parser.error(f"unknown case {', '.join(map(repr, unknown))}; known: {', '.join(CASES)}")
    args.cases = args.cases or list(_QUICK_CASES if args.quick else CASES)
    if args.quick or args.memory:
        args.rounds, args.seconds = 1, 0.0
    return args


if __name__ == "__main__":
    main()
