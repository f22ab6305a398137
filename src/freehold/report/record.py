"""Reports as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from freehold.plan.layout import Layout
from freehold.report.doctor import Finding
from freehold.report.measure import LayoutReport

__all__ = ["comparison_to_json", "findings_to_json", "report_record", "to_json"]

JsonObject = dict[str, object]


def report_record(report: LayoutReport) -> JsonObject:
    """The figures of a report as a JSON object.

    Example:
        >>> from freehold.plan import ParamSpec
        >>> from freehold.report.compare import planned
        >>> made = planned([ParamSpec(name="w", shape=(64, 64))], num_ranks=1, bucket_numel=None, policy="absorb")
        >>> report_record(made.report)["bytes_per_rank"]
        {'params': 8192, 'grads': 16384, 'state': 32768}
    """
    held = report.bytes_per_rank
    return {
        "real_numel": report.real_numel,
        "buffer_numel": report.buffer_numel,
        "padding_numel": report.padding_numel,
        "padding_fraction": report.padding_fraction,
        "lower_bound_numel": report.lower_bound_numel,
        "makespan": report.makespan,
        "makespan_lower_bound": report.makespan_lower_bound,
        "num_buckets": report.num_buckets,
        "largest_bucket_numel": report.largest_bucket_numel,
        "bytes_per_rank": {"params": held.params, "grads": held.grads, "state": held.state},
        "plan_s": report.plan_s,
    }


def to_json(layout: Layout, report: LayoutReport, *, notes: Sequence[str] = ()) -> str:
    """A layout and its figures as one JSON object; ``layout`` is what ``Layout.from_json`` reads.

    Args:
        layout: The layout.
        report: Its figures.
        notes: What the source has to say; the report's own advice follows it.
    """
    record = {
        "layout": json.loads(layout.to_json()),
        "report": report_record(report),
        "notes": [*notes, *report.advice],
    }
    return json.dumps(record, separators=(",", ":"))


def comparison_to_json(source: str, reports: Sequence[LayoutReport], *, notes: Sequence[str] = ()) -> str:
    """Several layouts' figures as one JSON object.

    Args:
        source: Name of the model.
        reports: The figures.
        notes: What the source has to say.
    """
    results = [
        {
            "num_ranks": report.num_ranks,
            "policy": report.policy,
            "bucket_numel": report.bucket_numel,
            "report": report_record(report),
            "notes": list(report.advice),
        }
        for report in reports
    ]
    return json.dumps({"source": source, "notes": list(notes), "results": results}, indent=2)


def findings_to_json(findings: Sequence[Finding]) -> str:
    """What ``freehold doctor`` found, as a JSON list."""
    rows = [{"subject": f.subject, "status": f.status, "detail": f.detail} for f in findings]
    return json.dumps(rows, indent=2)
