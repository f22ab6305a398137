"""Regenerate the planner's tables as Markdown; with ``--write FILE`` in the file itself, between its markers.

    python benchmarks/planner_table.py fused          matrices as Megatron-LM fuses them, 10 models x 8 to 512 ranks
    python benchmarks/planner_table.py models         Hugging Face models with 3-D stacks, 13 models x 8 to 1,024 ranks
    python benchmarks/planner_table.py scale          45,090 matrices on 128 to 4,096 ranks
    python benchmarks/planner_table.py --curve        planning time against the number of matrices and of ranks
    python benchmarks/planner_table.py gaps           distance to the proved optimum on 300 small problems
    python benchmarks/planner_table.py --write docs/planner.md

Seconds are of one core (``time.process_time``), bounds not included. Everything else is the same on every machine.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from freehold.plan import PackedBucket, ParamSpec, Problem
from freehold.plan.bounds import buffer_bound
from freehold.plan.policies import POLICIES
from freehold.plan.policies.packed import PackedPolicy
from markdown_blocks import replace_block
from planner_cases import (
    Figures,
    fused_zoo,
    measure,
    model_zoo,
    problem_of,
    small_case,
    unstacked_deepseek,
    zoo_bucket_numel,
)

FUSED_RANKS = (8, 16, 32, 64, 128, 256, 512)
MODEL_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
SCALE_RANKS = (128, 256, 512, 1024, 2048, 4096)

GROWTHS = (2.2, 1.6, 1.3, 1.15, 1.05, 1.0)
"""Limits that are tried to find plans of at least as many buckets as ``ns_cost`` makes."""


def percent(part: float) -> str:
    return f"{100 * part:.2f}%"


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def head(*cells: str) -> str:
    return row(*cells) + "\n" + "|" + "---|" * len(cells)


def timed(policy: Callable[[Problem], tuple[PackedBucket, ...]], problem: Problem) -> tuple[Figures, float]:
    start = time.process_time()
    buckets = policy(problem)
    seconds = time.process_time() - start
    return measure(problem, buckets), seconds


def at_least(problem: Problem, num_buckets: int) -> str:
    """Best padding with that many buckets or more, and how many it has."""
    found: list[Figures] = []
    for growth in GROWTHS:
        figures, _ = timed(PackedPolicy(max_growth=growth), problem)
        if figures.num_buckets >= num_buckets:
            found.append(figures)
            if figures.padding <= figures.bound:
                break
    if not found:
        return "-"
    best = min(found, key=lambda figures: figures.padding)
    return f"{percent(best.padding)} ({best.num_buckets})"


def fused_table() -> Iterator[str]:
    yield head(
        "model", "ranks", "ns_cost (buckets)", "bound", "packed (buckets)",
        "at ns_cost's count or more", "largest bucket",
        "makespan packed / ns_cost", "exposed packed / ns_cost", "s",
    )  # fmt: skip
    worse = 0
    for model, params in fused_zoo().items():
        for num_ranks in FUSED_RANKS:
            problem = problem_of(params, num_ranks, zoo_bucket_numel(num_ranks))
            ours, seconds = timed(PackedPolicy(), problem)
            other, _ = timed(POLICIES["ns_cost"], problem)
            worse += ours.exposed > other.exposed + 0.0005
            if ours.num_buckets >= other.num_buckets:
                same_count = f"{percent(ours.padding)} ({ours.num_buckets})"
            else:
                same_count = at_least(problem, other.num_buckets)
            yield row(
                model, num_ranks, f"{percent(other.padding)} ({other.num_buckets})", percent(ours.bound),
                f"{percent(ours.padding)} ({ours.num_buckets})", same_count, f"{ours.largest:.2f}",
                f"{ours.makespan:.3f} / {other.makespan:.3f}",
                f"{ours.exposed:.3f} / {other.exposed:.3f}",
                f"{seconds:.2f}",
            )  # fmt: skip
    yield f"\nMore exposed than `ns_cost` in {worse} of {len(fused_zoo()) * len(FUSED_RANKS)} rows."


def models_table() -> Iterator[str]:
    yield head("model", *(str(num_ranks) for num_ranks in MODEL_RANKS))
    gaps: list[float] = []
    spent: list[float] = []
    for model, params in model_zoo().items():
        cells: list[str] = []
        for num_ranks in MODEL_RANKS:
            figures, seconds = timed(PackedPolicy(), problem_of(params, num_ranks, zoo_bucket_numel(num_ranks)))
            gaps.append(figures.padding - figures.bound)
            spent.append(seconds)
            cells.append(
                f"{percent(figures.padding)} / {percent(figures.bound)} ({figures.num_buckets}) {figures.makespan:.2f}"
            )
        yield row(model, *cells)
    gaps.sort()
    spent.sort()
    yield (
        f"\nAbove the bound: median {100 * gaps[len(gaps) // 2]:.3f} points, at most {100 * gaps[-1]:.2f}. "
        f"Seconds: median {spent[len(spent) // 2]:.2f}, at most {spent[-1]:.2f}."
    )


def scale_table() -> Iterator[str]:
    yield head("ranks", "bound", "padding (buckets)", "makespan", "exposed", "s")
    for num_ranks in SCALE_RANKS:
        problem = problem_of(unstacked_deepseek(), num_ranks, zoo_bucket_numel(num_ranks))
        figures, seconds = timed(PackedPolicy(), problem)
        yield row(
            num_ranks, percent(figures.bound), f"{percent(figures.padding)} ({figures.num_buckets})",
            f"{figures.makespan:.3f}", f"{figures.exposed:.3f}", f"{seconds:.2f}",
        )  # fmt: skip


def curve() -> Iterator[str]:
    counts, ranks = (1_000, 3_000, 10_000, 30_000, 45_090), (16, 64, 256, 1024, 4096)
    yield head("matrices", *(f"{num_ranks} ranks, s" for num_ranks in ranks))
    for count in counts:
        cells: list[str] = []
        for num_ranks in ranks:
            params: Sequence[ParamSpec] = unstacked_deepseek()[:count]
            _, seconds = timed(PackedPolicy(), problem_of(params, num_ranks, zoo_bucket_numel(num_ranks)))
            cells.append(f"{seconds:.2f}")
        yield row(f"{count:,}", *cells)


def gaps_table() -> Iterator[str]:
    from packing_oracle import least_height  # needs ortools, the other tables do not

    for label, policy in (("defaults", PackedPolicy()), ("max_growth=50", PackedPolicy(max_growth=50))):
        gaps: list[float] = []
        undecided = 0
        for seed in range(300):
            params, num_ranks, bucket_numel = small_case(seed)
            problem = problem_of(params, num_ranks, bucket_numel)
            bound = buffer_bound(problem)
            reached = sum(bucket.shard_numel for bucket in policy(problem))
            optimum: int | None = reached
            if reached > bound.active.value:
                counts = Counter(spec.numel for spec in params)
                sizes = tuple(sorted(counts, reverse=True))
                common = math.gcd(*sizes)
                step = problem.shard_unit if common % problem.shard_unit else common
                counted = tuple(counts[size] for size in sizes)
                optimum = least_height(sizes, counted, num_ranks, low=bound.active.value, high=reached, step=step)
            if optimum is None:
                undecided += 1
            else:
                gaps.append(100 * (reached - optimum) * num_ranks / bound.real_numel)
        steps = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
        cells = [sum(gap <= step for gap in gaps) for step in steps]
        if label == "defaults":
            yield head("knobs", "mean", "largest", *(f"<= {step} points" for step in steps), "undecided")
        yield row(label, f"{sum(gaps) / len(gaps):.3f}", f"{max(gaps):.2f}", *cells, undecided)


TABLES = {"fused": fused_table, "models": models_table, "scale": scale_table, "curve": curve, "gaps": gaps_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="which tables; all by default")
    parser.add_argument("--curve", action="store_true", help="planning time only")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in this file")
    args = parser.parse_args()
    for name in ["curve"] if args.curve else args.tables or list(TABLES):
        print(f"\n## {name}\n")
        lines: list[str] = []
        for line in TABLES[name]():
            print(line, flush=True)
            lines += line.splitlines()
        if args.write is not None:
            replace_block(args.write, f"table {name}", lines)


if __name__ == "__main__":
    main()
