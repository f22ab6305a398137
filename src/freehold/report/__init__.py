"""Layouts for people and for programs: tables, JSON, comparisons, pictures."""

from freehold.report.compare import PlannedReport, compare, planned
from freehold.report.doctor import Finding, examine
from freehold.report.drawing import Drawing, make_drawing
from freehold.report.html import to_html
from freehold.report.measure import LayoutReport, RankBytes, measure
from freehold.report.record import comparison_to_json, findings_to_json, report_record, to_json
from freehold.report.svg import to_svg
from freehold.report.table import render_comparison, render_findings, render_table

__all__ = [
    "Drawing",
    "Finding",
    "LayoutReport",
    "PlannedReport",
    "RankBytes",
    "compare",
    "comparison_to_json",
    "examine",
    "findings_to_json",
    "make_drawing",
    "measure",
    "planned",
    "render_comparison",
    "render_findings",
    "render_table",
    "report_record",
    "to_html",
    "to_json",
    "to_svg",
]
