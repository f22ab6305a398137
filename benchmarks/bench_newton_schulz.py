"""Newton-Schulz: speed over a matmul and over torch.optim.Muon's, accuracy against float64, cost against the clock.

    python benchmarks/bench_newton_schulz.py                       # all three tables, about 4 minutes on 1 core
    python benchmarks/bench_newton_schulz.py speed --max-gflop 200 -o speed.json
    python benchmarks/bench_newton_schulz.py accuracy
    python benchmarks/bench_newton_schulz.py cost

speed: every distinct matrix of the models in tests/data/zoo, and small experts; shapes above ``--max-gflop`` are
halved until they fit, and marked. torch.optim.Muon's function and freehold's methods take turns in every round; times
are the least of all rounds. The percentage is the flops of the standard iteration over time, over the flop/s of one
bfloat16 product (m, m) @ (m, n).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from freehold import CostModel, Muon
from freehold.plan import Layout, ParamSpec, newton_schulz_flops, plan, rank_costs
from freehold.rules import Block, Span, calibration, newton_schulz
from freehold.rules.polar.coefficients import COEFFICIENT_SETS, schedule_of
from freehold.rules.polar.products import Workspace
from freehold.rules.polar.select import select_variant
from freehold.rules.polar.variants import pieces

ZOO = Path(__file__).parents[1] / "tests" / "data" / "zoo"
JORDAN = (3.4445, -4.775, 2.0315)
SMALL_EXPERTS = ((64, 256), (192, 256), (256, 192), (384, 512), (768, 2048), (1536, 2048))
BATCHES = (1, 8, 16)


def main() -> None:
    """Print the tables that are asked for."""
    args = _parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record: dict[str, Any] = {}
    for name in args.tables or ("speed", "accuracy", "cost"):
        rows, lines = TABLES[name](args)
        record[name] = rows
        print(f"\n## {name}\n\n" + "\n".join(lines), flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


# -- speed


def speed(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Zoo shapes one by one, then small experts in batches."""
    cases = [(*shape, 1) for shape in zoo_shapes()] + [(*shape, b) for shape in SMALL_EXPERTS for b in BATCHES]
    rows: dict[tuple[int, int, int], dict[str, Any]] = {}
    for num_rows, num_cols, batch in cases:
        halvings = _halvings(num_rows, num_cols, batch, args.max_gflop)
        key = (num_rows >> halvings, num_cols >> halvings, batch)
        if key not in rows:
            rows[key] = _time_shape(*key, args.rounds) | {"stands_for": []}
        if halvings:
            rows[key]["stands_for"].append(f"{num_rows}x{num_cols}")
    head = [
        "M x N (stands for)",
        "batch",
        "torch ms",
        "standard",
        "gram",
        "auto",
        "auto / torch",
        "of matmul",
        "chosen",
    ]
    lines = [_row(head), _row(["---"] * len(head)), *(_speed_line(row) for row in rows.values())]
    ratios = [row["auto_s"] / row["torch_s"] for row in rows.values()]
    shares = [row["share"] for row in rows.values() if row["batch"] >= 8]
    lines += [
        "",
        f"auto / torch: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}. "
        f"Batches of 8 or more, of matmul: least {min(shares):.0%}, median {statistics.median(shares):.0%}. "
        f"Calibration: {sum(row['calibration_s'] for row in rows.values()):.1f} s for {len(rows)} shapes.",
    ]
    return list(rows.values()), lines


def zoo_shapes() -> list[tuple[int, int]]:
    """Every distinct matrix of the zoo that is no embedding or head, by work."""
    found: set[tuple[int, int]] = set()
    for path in sorted(ZOO.glob("*.json.gz")):
        for name, shape in json.loads(gzip.decompress(path.read_bytes())):
            if len(shape) >= 2 and not any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
                found.add(tuple(shape[-2:]) if len(shape) == 3 else (shape[0], math.prod(shape[1:])))
    for shapes in json.loads((ZOO / "fused.json").read_text()).values():
        found |= {tuple(shape) for shape in shapes}
    return sorted(found, key=lambda shape: (newton_schulz_flops(*shape), shape))


def _halvings(num_rows: int, num_cols: int, batch: int, max_gflop: float) -> int:
    halvings = 0
    while batch * newton_schulz_flops(num_rows >> halvings, num_cols >> halvings) > max_gflop * 1e9:
        halvings += 1
    return halvings


def _time_shape(num_rows: int, num_cols: int, batch: int, rounds: int) -> dict[str, Any]:
    grads = torch.randn(batch, num_rows, num_cols)
    begin = time.perf_counter()
    variant = select_variant("auto", None, grads, schedule_of(JORDAN, 5))
    calibration_s = time.perf_counter() - begin
    short, long = sorted((num_rows, num_cols))
    left, right = torch.randn(short, short).bfloat16(), torch.randn(short, long).bfloat16()
    systems: dict[str, Callable[[], object]] = {
        "torch": lambda: [torch_muon._zeropower_via_newtonschulz(grad, JORDAN, 5, 1e-7) for grad in grads],
        **{method: _method(method, grads) for method in ("standard", "gram", "auto")},
        "matmul": lambda: torch.mm(left, right),
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    for call in systems.values():
        _seconds(call)  # warm
    for _ in range(rounds):
        for name, call in systems.items():
            times[name].append(_seconds(call))
    least = {f"{name}_s": min(samples) for name, samples in times.items()}
    matmul_flops_per_s = 2 * short * short * long / min(times["matmul"])
    flops_per_s = batch * newton_schulz_flops(num_rows, num_cols) / least["auto_s"]
    return {
        "num_rows": num_rows,
        "num_cols": num_cols,
        "batch": batch,
        "variant": variant.to_text(),
        "calibration_s": calibration_s,
        "share": flops_per_s / matmul_flops_per_s,
        "matmul_gflop_per_s": matmul_flops_per_s / 1e9,
        **least,
    }


def _method(method: str, grads: Tensor) -> Callable[[], None]:
    """As a rule runs it: piece by piece, without a copy of the results."""
    schedule, work = schedule_of(JORDAN, 5), Workspace()
    variant = select_variant(method, None, grads, schedule)

    def run() -> None:
        for _ in pieces(grads, variant, schedule, work):
            pass

    return run


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _speed_line(row: dict[str, Any]) -> str:
    others = f" ({', '.join(row['stands_for'])})" if row["stands_for"] else ""
    times = [f"{row[f'{name}_s'] * 1e3:.2f}" for name in ("torch", "standard", "gram", "auto")]
    ratio = f"{row['auto_s'] / row['torch_s']:.2f}"
    shape = f"{row['num_rows']} x {row['num_cols']}{others}"
    return _row([shape, str(row["batch"]), *times, ratio, f"{row['share']:.0%}", row["variant"]])


# -- accuracy


def accuracy(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Every coefficient set, method and dtype on two kinds of matrices, against float64."""
    rows: list[dict[str, Any]] = []
    for kind, grad in accuracy_inputs().items():
        for name in COEFFICIENT_SETS:
            num_steps = 12 if name == "exact" else 5
            exact = _in_float64(grad, name, num_steps)
            for method in ("standard", "gram"):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    out = newton_schulz(grad, coefficients=name, num_steps=num_steps, method=method, dtype=dtype)
                    rows.append(_accuracy(grad, out, exact) | {"matrix": kind, "set": name, "steps": num_steps})
                    rows[-1] |= {"method": method, "dtype": str(dtype).removeprefix("torch.")}
    head = ["matrix", "set, steps", "method", "dtype", "band", "error against float64", "distance to polar factor"]
    lines = [_row(head), _row(["---"] * len(head))]
    lines += [
        _row(
            [
                row["matrix"],
                f"{row['set']}, {row['steps']}",
                row["method"],
                row["dtype"],
                f"{row['least']:.2f} to {row['largest']:.2f}",
                f"{row['error']:.1e}",
                f"{row['distance']:.3f}",
            ]
        )
        for row in rows
    ]
    return rows, lines


def accuracy_inputs() -> dict[str, Tensor]:
    """A Gaussian matrix, one with singular values from 1 to 1e-3, and one of rank 16."""
    left, _ = torch.linalg.qr(torch.randn(256, 256, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(1024, 256, dtype=torch.float64))
    spread = left @ torch.diag(torch.logspace(0, -3, 256, dtype=torch.float64)) @ right.mT
    return {
        "Gaussian 256x1024": torch.randn(256, 1024),
        "Gaussian 256x256": torch.randn(256, 256),
        "1 to 1e-3, 256x1024": spread.float(),
        "rank 16, 256x1024": torch.randn(256, 16) @ torch.randn(16, 1024),
    }


def _in_float64(grad: Tensor, coefficients: str, num_steps: int) -> Tensor:
    left, values, right = torch.linalg.svd(grad.double(), full_matrices=False)
    x = values / values.norm()
    for a, b, c in schedule_of(coefficients, num_steps):
        x = a * x + b * x**3 + c * x**5
    return left @ torch.diag(x) @ right


def _accuracy(grad: Tensor, out: Tensor, exact: Tensor) -> dict[str, float]:
    """The band: what became of the directions whose singular value is at least 0.002 of the norm."""
    left, values, right = torch.linalg.svd(grad.double(), full_matrices=False)
    kept = values >= 0.002 * values.norm()
    inside = left[:, kept].mT @ out.double() @ right[kept].mT
    produced = torch.linalg.svdvals(inside)
    polar = left[:, kept] @ right[kept]
    seen = left[:, kept] @ inside @ right[kept]
    return {
        "least": float(produced.min()),
        "largest": float(torch.linalg.svdvals(out.double()).max()),
        "error": float((out.double() - exact).norm() / exact.norm()),
        "distance": float((seen - polar).norm() / polar.norm()),
    }


# -- cost


def cost(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Seconds of each of 2 ranks in Muon's update of a GPT and of a MoE: predicted by both models, and real."""
    rows: list[dict[str, Any]] = []
    for model, params in cost_models().items():
        for method in ("standard", "auto"):
            measured = CostModel.measured(method=method)
            costs = measured.table(params, num_ranks=2)
            layout = plan(params, num_ranks=2, bucket_numel=1_000_000, costs=costs)
            rows += _compare_cost(layout, costs, method, args.rounds, {"model": model, "method": method})
    head = ["model", "method", "rank", "real ms", "measured model", "error", "flop formula", "error"]
    lines = [_row(head), _row(["---"] * len(head))]
    lines += [
        _row(
            [
                row["model"],
                row["method"],
                str(row["rank"]),
                f"{row['real_s'] * 1e3:.1f}",
                f"{row['measured_s'] * 1e3:.1f}",
                f"{row['measured_s'] / row['real_s'] - 1:+.0%}",
                f"{row['formula_s'] * 1e3:.1f}",
                f"{row['formula_s'] / row['real_s'] - 1:+.0%}",
            ]
        )
        for row in rows
    ]
    return rows, lines


def cost_models() -> dict[str, list[ParamSpec]]:
    """The matrices of the models of the step benchmark."""
    gpt = [*([(512, 512)] * 4), (2048, 512), (512, 2048)]
    moe = [*([(256, 256)] * 4), *([(192, 256), (256, 192)] * 16)]
    return {
        name: [
            ParamSpec(name=f"layers.{layer}.{i}", shape=shape, dtype="float32")
            for layer in range(num_layers)
            for i, shape in enumerate(shapes)
        ]
        for name, num_layers, shapes in (("GPT, width 512", 8, gpt), ("MoE, width 256", 4, moe))
    }


def _compare_cost(
    layout: Layout, costs: dict[tuple[int, int], int], method: str, rounds: int, what: dict[str, str]
) -> Iterable[dict[str, Any]]:
    side = torch.randn(512, 512).bfloat16()
    flops_per_s = 2 * 512**3 / min(_seconds(lambda: side @ side) for _ in range(10))
    predicted = rank_costs(layout, costs)
    flops = rank_costs(layout, {shape: newton_schulz_flops(*shape) for shape in costs})
    for rank in range(layout.num_ranks):
        yield {
            **what,
            "rank": rank,
            "real_s": _update_s(layout, rank, method, rounds),
            "measured_s": predicted[rank] * 1e-9,
            "formula_s": flops[rank] / flops_per_s,
        }


def _update_s(layout: Layout, rank: int, method: str, rounds: int) -> float:
    """One rank's ``Muon.update`` over all buckets, momentum and weights included."""
    rule = Muon(lr=0.02, method=method)
    shapes = {spec.name: spec.shape for spec in layout.params}
    spans: list[Span] = []
    for bucket in layout.buckets:
        slots = bucket.slots_of_rank(rank)
        numel = slots[-1].offset + slots[-1].numel if slots else 0
        tensors = [torch.randn(numel) for _ in range(3)]
        blocks = tuple(Block(offset=slot.offset, shape=shapes[slot.name]) for slot in slots)
        spans.append(
            Span(param=tensors[0], grad=tensors[1], state={"momentum_buffer": tensors[2]}, blocks=blocks, step=1)
        )
    # Each bucket's least time: on a machine with other work, no whole update is undisturbed.
    least = [float("inf")] * len(spans)
    for _ in range(rounds + 1):
        for index, span in enumerate(spans):
            begin = time.perf_counter()
            rule.update(span, rule.defaults())
            least[index] = min(least[index], time.perf_counter() - begin)
    return sum(least)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


TABLES = {"speed": speed, "accuracy": accuracy, "cost": cost}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="speed, accuracy, cost; all by default")
    parser.add_argument("--max-gflop", type=float, default=60.0, help="work of one batch; larger shapes are halved")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calibration", type=Path, help="choices to load first, as Calibration.to_json writes them")
    parser.add_argument("-o", "--output", type=Path, help="JSON")
    args = parser.parse_args()
    if args.calibration is not None:
        calibration().load(args.calibration.read_text())
    return args


if __name__ == "__main__":
    main()
