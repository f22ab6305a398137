"""How fast gloo moves a bucket: its built-in collectives against freehold's exchange of shards.

    python benchmarks/bench_collectives.py                 # two ranks, 0.25 to 64 MiB
    python benchmarks/bench_collectives.py --ranks 4 --rounds 20 -o collectives.json

The buffer is float32 and divides evenly over the ranks. Every call is waited for and followed by a barrier; the systems
take turns in every round. A ratio is the median over rounds of built-in time over freehold's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from freehold.runtime.comm import Comm, make_comm

_MIB = 2**20
_PAIRS = (
    ("reduce-scatter", "built-in reduce-scatter", "freehold reduce-scatter"),
    ("all-gather", "built-in all-gather", "freehold all-gather"),
)


def main() -> None:
    """Start the ranks through torchrun, or be one of them."""
    args = _parse()
    if "RANK" in os.environ:
        _work(args)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    subprocess.run([*command, *sys.argv], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _work(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    comm = make_comm(group, torch.device("cpu"))
    samples = {mib: _measure(comm, int(mib * _MIB), args.rounds) for mib in args.mib}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} gloo ranks, {args.rounds} rounds, medians in milliseconds\n")
        print("\n".join(_table(samples)))
        if args.output is not None:
            args.output.write_text(json.dumps(samples, indent=1) + "\n")
    dist.destroy_process_group()


def _measure(comm: Comm, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every operation in every round."""
    flat = torch.ones(num_bytes // 4 // comm.num_ranks * comm.num_ranks)
    operations = _operations(comm, flat)
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for index in range(rounds + 1):
        for name, operation in operations.items():
            flat.fill_(1.0)
            dist.barrier()
            start_s = time.perf_counter()
            operation()
            dist.barrier()
            if index:  # the first round warms up connections and pools
                seconds[name].append(time.perf_counter() - start_s)
    return seconds


def _operations(comm: Comm, flat: Tensor) -> dict[str, Callable[[], object]]:
    own = comm.own_shard(flat)
    # Gloo's reduce-scatter cannot write into its input, so it gets a tensor of its own.
    out = torch.empty_like(own)
    return {
        "built-in all-reduce": lambda: dist.all_reduce(flat),
        "built-in reduce-scatter": lambda: dist.reduce_scatter_tensor(out, flat),
        "freehold reduce-scatter": lambda: comm.reduce_scatter(flat, 0).wait(),
        "built-in all-gather": lambda: dist.all_gather_into_tensor(flat, out),
        "freehold all-gather": lambda: comm.all_gather(flat, 0).wait(),
    }


def _table(samples: dict[float, dict[str, list[float]]]) -> Iterator[str]:
    names = list(next(iter(samples.values())))
    yield "| MiB | " + " | ".join(names) + " | " + " | ".join(f"{label} ratio" for label, _, _ in _PAIRS) + " |"
    yield "|---" * (1 + len(names) + len(_PAIRS)) + "|"
    for mib, seconds in samples.items():
        medians = [f"{1000 * statistics.median(seconds[name]):.2f}" for name in names]
        ratios = [f"{_ratio(seconds[theirs], seconds[ours]):.1f}" for _, theirs, ours in _PAIRS]
        yield f"| {mib:g} | " + " | ".join(medians + ratios) + " |"


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[0.25, 1.0, 4.0, 16.0, 64.0], help="sizes of the buffer"
    )
    parser.add_argument("-o", "--output", type=Path, help="write all samples as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    # torch 2.13 renamed the two single-tensor collectives; the old names exist in every version that we support.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    main()
