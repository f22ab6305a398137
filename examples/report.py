"""What a run says of itself: the layout before it, speed and memory after it, in aligned plain text."""

from __future__ import annotations

import resource
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from freehold.plan.cost import flop_costs, rank_costs
from freehold.plan.layout import Layout
from freehold.report import make_drawing, to_html
from systems import StateBytes

__all__ = ["RunResult", "layout_lines", "peak_bytes", "picture_lines", "result_lines", "row", "say"]

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one training run leaves behind on this rank.

    Attributes:
        system: Name of the system that was trained.
        losses: This rank's mean loss of every step, in nats per byte.
        step_s: Seconds of every step.
        optimizer_step_s: Seconds of the optimizer's part of every step.
        bits_per_byte: On held-out text, over all ranks.
        held: Optimizer state on this rank.
        layout: The layout, if the system has one.
    """

    system: str
    losses: list[float]
    step_s: list[float]
    optimizer_step_s: list[float]
    bits_per_byte: float
    held: StateBytes
    layout: Layout | None


def say(*lines: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def row(label: str, value: str) -> str:
    """One aligned line."""
    return f"{label:<22} {value}"


def layout_lines(layout: Layout) -> list[str]:
    """Buckets, padding, each rank's share of the Newton-Schulz work, and params by rule."""
    lines = [row("buckets", f"{len(layout.buckets)}, laid out by policy {layout.policy!r}")]
    for bucket in layout.buckets:
        padding = _percent(bucket.numel - bucket.real_numel, bucket.real_numel)
        size = f"{bucket.real_numel:,} elements, {bucket.num_ranks} shards of {bucket.shard_numel:,}"
        lines.append(row(f"  {bucket.index} {bucket.mode} {bucket.dtype}", f"{size}, padding {padding}"))
    lines.append(
        row("padding", f"{_percent(layout.padding_numel, layout.real_numel)} of {layout.real_numel:,} elements")
    )
    for rule, meaning in (("matrix", "Muon"), ("elementwise", "AdamW")):
        numels = [spec.numel for spec in layout.params if spec.rule == rule and spec.tied_to is None]
        lines.append(row(f"{meaning} params", f"{len(numels)}, together {sum(numels):,} elements"))
    costs = rank_costs(layout, flop_costs(layout.params))
    shares = " ".join(_percent(cost, max(1, sum(costs)), digits=1) for cost in costs)
    return [*lines, row("Newton-Schulz work", f"{shares} by rank")]


def picture_lines(layout: Layout, file: Path) -> list[str]:
    """Draw the layout into an interactive page, on rank 0, and tell where it is."""
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_html(make_drawing([layout], title="GPT of the demo")), encoding="utf-8")
    return [row("picture", f"{file} (open it in a browser)")]


def result_lines(result: RunResult) -> list[str]:
    """Quality, speed and memory; a collective call, because memory is told for every rank."""
    held: list[StateBytes] = [result.held] * dist.get_world_size()
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(held, result.held)
    dist.all_gather_object(peaks, peak_bytes())
    gathers = " (new weights are gathered later, under the next forward)" if result.layout is not None else ""
    lines = [
        row("validation", f"{result.bits_per_byte:.4f} bits per byte after {len(result.losses)} steps"),
        row("step", f"{1000 * statistics.median(result.step_s):.1f} ms (median)"),
        row("  of it optimizer", f"{1000 * statistics.median(result.optimizer_step_s):.1f} ms{gathers}"),
        row("peak memory", _mib(peaks) + " by rank, of the whole process"),
        row("optimizer state", _mib([item.state_bytes for item in held]) + " by rank"),
    ]
    if any(item.master_bytes for item in held):
        lines.append(row("fp32 masters", _mib([item.master_bytes for item in held]) + " by rank"))
    if result.layout is not None:
        lines.append(row("  if replicated", _mib([_replicated_state_bytes(result.layout)]) + " on every rank"))
    return lines


def peak_bytes() -> int:
    """Most memory that this process ever held: of its GPU under NCCL, else resident."""
    if dist.get_backend() == "nccl":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _replicated_state_bytes(layout: Layout) -> int:
    """State of the same rules in torch.optim on one rank, which keeps it in the weights' dtype."""
    copies = {"matrix": 1, "elementwise": 2}  # Muon keeps one momentum, AdamW two moments
    return sum(
        copies[spec.rule] * spec.numel * torch.tensor([], dtype=getattr(torch, spec.dtype)).element_size()
        for spec in layout.params
        if spec.tied_to is None
    )


def _percent(part: int, whole: int, *, digits: int = 2) -> str:
    return f"{100.0 * part / whole:.{digits}f}%"


def _mib(sizes: list[int]) -> str:
    return " ".join(f"{size / _MIB:.1f}" for size in sizes) + " MiB"
