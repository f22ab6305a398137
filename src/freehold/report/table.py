"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from freehold.report.doctor import Finding
from freehold.report.measure import LayoutReport

__all__ = ["render_comparison", "render_findings", "render_table"]


def render_table(report: LayoutReport, *, title: str = "", notes: Sequence[str] = ()) -> RenderableType:
    """One layout: what was reached, and what no layout can beat.

    Args:
        report: The figures.
        title: Printed above the table.
        notes: Printed below it, before the report's own advice.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> from freehold.plan import ParamSpec
        >>> from freehold.report.compare import planned
        >>> params = [ParamSpec(name=f"layers.{i}", shape=(64, 64)) for i in range(4)]
        >>> made = planned(params, num_ranks=2, bucket_numel=None, policy="absorb")
        >>> Console(file=io.StringIO(), width=80).print(render_table(made.report, title="toy"))
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("reached", justify="right")
    table.add_column("lower bound", justify="right")
    for label, reached, bound in _rows(report):
        table.add_row(label, reached, bound)
    return Group(*_heading(report, title), table, *_paragraphs((*notes, *report.advice)))


def _heading(report: LayoutReport, title: str) -> Iterable[Text]:
    if title:
        yield Text(title, style="bold")
    size = "one bucket" if report.bucket_numel is None else f"bucket_numel {report.bucket_numel:,}"
    yield Text(f"{report.num_params:,} params on {report.num_ranks:,} ranks, policy {report.policy}, {size}")


def _rows(report: LayoutReport) -> Iterable[tuple[str, str, str]]:
    held = report.bytes_per_rank
    least = report.lower_bound_numel - report.real_numel
    yield "elements of params", f"{report.real_numel:,}", ""
    yield "elements of buffers", f"{report.buffer_numel:,}", f"{report.lower_bound_numel:,}"
    yield "padding", f"{report.padding_numel:,}", f"{least:,}"
    yield "padding / params", _percent(report.padding_fraction), _percent(report.padding_fraction_lower_bound)
    yield "Newton-Schulz makespan", f"{report.makespan:.4g}", f"{report.makespan_lower_bound:.4g}"
    yield "makespan / bound", _ratio(report), "1.000"
    yield "buckets", f"{report.num_buckets:,}", ""
    yield "largest bucket, elements", f"{report.largest_bucket_numel:,}", ""
    yield "memory of a rank", _gigabytes(held.total), ""
    yield "  weights", _gigabytes(held.params), ""
    yield "  gradients (fp32)", _gigabytes(held.grads), ""
    yield "  masters and state", _gigabytes(held.state), ""
    yield "planned in", f"{report.plan_s:.2f} s", ""


def render_comparison(reports: Sequence[LayoutReport], *, title: str = "", notes: Sequence[str] = ()) -> RenderableType:
    """Several layouts of the same params, a line each; the best of each number of ranks is marked.

    Args:
        reports: In the order of the lines.
        title: Printed above the table.
        notes: Printed below it, before the advice of each number of ranks.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("ranks", "policy", "padding", "bound", "makespan", "buckets", "GB/rank", "plan s"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    least = {n: min(r.buffer_numel for r in reports if r.num_ranks == n) for n in _rank_counts(reports)}
    for index, report in enumerate(reports):
        is_last = index + 1 == len(reports) or reports[index + 1].num_ranks != report.num_ranks
        is_best = report.buffer_numel == least[report.num_ranks]
        table.add_row(*_cells(report, is_best=is_best), end_section=is_last)
    legend = (
        "* least padding of its number of ranks. bound: the least padding of any layout. makespan: Newton-Schulz work "
        "of the dearest rank over its lower bound. GB/rank: weights, fp32 gradients, masters and state."
    )
    return Group(
        *([Text(title, style="bold")] if title else []), table, *_paragraphs((legend, *notes, *_advice(reports)))
    )


def _cells(report: LayoutReport, *, is_best: bool) -> tuple[str, ...]:
    return (
        f"{report.num_ranks:,}",
        report.policy,
        f"{_percent(report.padding_fraction)} {'*' if is_best else ' '}",
        _percent(report.padding_fraction_lower_bound),
        _ratio(report),
        f"{report.num_buckets:,}",
        f"{report.bytes_per_rank.total / 1e9:,.1f}" if report.bytes_per_rank.total > 1e8 else "< 0.1",
        f"{report.plan_s:.2f}",
    )


def _rank_counts(reports: Sequence[LayoutReport]) -> list[int]:
    return list(dict.fromkeys(report.num_ranks for report in reports))


def _advice(reports: Sequence[LayoutReport]) -> Iterable[str]:
    """Bounds hold for every policy, so each number of ranks is explained once."""
    for num_ranks in _rank_counts(reports):
        report = next(report for report in reports if report.num_ranks == num_ranks)
        yield from (f"{num_ranks:,} ranks: {line}" for line in report.advice)


def _paragraphs(lines: Iterable[str]) -> list[Text]:
    return [Text(line) for line in lines]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def _ratio(report: LayoutReport) -> str:
    return f"{report.makespan / report.makespan_lower_bound:.3f}" if report.makespan_lower_bound else "-"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.3f} MB"


def render_findings(findings: Sequence[Finding]) -> RenderableType:
    """What ``freehold doctor`` found."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for finding in findings:
        style = {"ok": "green", "missing": "yellow", "broken": "bold red"}[finding.status]
        table.add_row(finding.subject, Text(finding.status, style=style), Text(finding.detail, overflow="fold"))
    return table
