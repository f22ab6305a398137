"""What ``bench_step.py`` measured, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from step_systems import LABELS

__all__ = ["memory_table", "products_line", "time_table"]

_REFERENCES = {"ddp-adamw": "AdamW", "ddp-muon": "Muon"}
_MIB = 2**20

Record = Mapping[str, Any]
"""What ``step_worker.py`` wrote."""


def time_table(record: Record) -> Iterator[str]:
    """A row a system: times, their ratios to both references, seconds to start, memory kept.

    A time is the median of all samples, with the least and the largest; a ratio is the median over rounds of the
    quotient within a round.
    """
    parts = ("step", "optimizer", "backward")
    yield (
        "| system | whole step, ms | x AdamW | x Muon | optimizer, ms | x AdamW | x Muon | forward and backward, ms "
        "| construction and first step, s | kept, MiB |"
    )
    yield "|---" * 10 + "|"
    measured = [name for name in LABELS if name in record["ranks"][0]["started_s"]]
    for name in measured:
        cells: list[str] = []
        for part in parts:
            cells.append(_spread(_seconds(record, name, part)))
            if part != "backward":
                cells += [_ratio(record, name, reference, part) for reference in _REFERENCES]
        started_s = max(rank["started_s"][name] for rank in record["ranks"])
        kept = _mib(sum(rank["held_bytes"][name].values()) for rank in record["ranks"])
        yield f"| {LABELS[name]} | " + " | ".join([*cells, f"{started_s:.1f}", kept]) + " |"
    yield from _unavailable(record)


def memory_table(records: Mapping[str, Record]) -> Iterator[str]:
    """A row a system: what it keeps, its peak, and the peak of DDP + Muon less the state that it saves.

    Args:
        records: One of each system, which ran alone.
    """
    yield "| system | weights | gradients | masters | state | peak growth | DDP + Muon less saved state | ratio |"
    yield "|---" * 8 + "|"
    reference = records.get("ddp-muon")
    for name, record in records.items():
        if name in record["unavailable"]:
            continue
        held = [rank["held_bytes"][name] for rank in record["ranks"]]
        cells = [_mib(rank[key] for rank in held) for key in ("weights", "gradients", "masters", "state")]
        peak = max(rank["peak_growth_bytes"] for rank in record["ranks"])
        cells += [_mib(rank["peak_growth_bytes"] for rank in record["ranks"]), *_expected(reference, held, peak)]
        yield f"| {LABELS[name]} | " + " | ".join(cells) + " |"
    for record in records.values():
        yield from _unavailable(record)


def _expected(reference: Record | None, held: Sequence[Mapping[str, int]], peak: int) -> tuple[str, str]:
    """The peak of DDP + Muon, less what this system keeps less of state and masters; and ``peak`` over it."""
    if reference is None:
        return "-", "-"
    ranks = reference["ranks"]
    saved = max(_state_bytes(rank["held_bytes"]["ddp-muon"]) for rank in ranks) - max(map(_state_bytes, held))
    expected = max(rank["peak_growth_bytes"] for rank in ranks) - saved
    return _mib([expected]), f"{peak / expected:.2f}" if expected > 0 else "-"


def _state_bytes(held: Mapping[str, int]) -> int:
    return held["state"] + held["masters"]


def products_line(record: Record) -> str:
    """Which bfloat16 products were used, and how fast this machine's are."""
    rates = {dtype: f"{value / 1e9:.0f}" for dtype, value in record["products"]["flops_per_s"].items()}
    used = {"native": "torch's own bfloat16 kernels", "float32": "float32 products rounded to bfloat16"}
    return (
        f"Bfloat16 products by {used[record['products']['used']]}; 512 x 512 products on one thread: "
        f"{rates['bfloat16']} Gflop/s in bfloat16, {rates['float32']} in float32"
    )


def _unavailable(record: Record) -> Iterator[str]:
    for name, reason in record["unavailable"].items():
        yield f"\nNot measured: {LABELS[name]}: {reason}."


def _seconds(record: Record, system: str, part: str) -> list[float]:
    return [s["seconds"] for s in record["samples"] if s["system"] == system and s["what"] == part]


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    middle, low, high = (1000 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def _ratio(record: Record, system: str, reference: str, part: str) -> str:
    ours, theirs = (_by_round(record, name, part) for name in (system, reference))
    ratios = [statistics.median(ours[i]) / statistics.median(theirs[i]) for i in ours.keys() & theirs.keys()]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _by_round(record: Record, system: str, part: str) -> dict[int, list[float]]:
    rounds: dict[int, list[float]] = {}
    for sample in record["samples"]:
        if sample["system"] == system and sample["what"] == part:
            rounds.setdefault(sample["round"], []).append(sample["seconds"])
    return rounds


def _mib(sizes: Iterable[int]) -> str:
    """One figure if all ranks have the same, else one for each."""
    shown = [f"{size / _MIB:.0f}" for size in sizes]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)
