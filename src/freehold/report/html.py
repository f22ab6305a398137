"""The interactive page: one HTML file that needs no network and no other file."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from freehold.plan.cost import flop_costs, granule_cost
from freehold.plan.timeline import Timeline
from freehold.report.colouring import Colouring, shape_text
from freehold.report.drawing import Band, Drawing, Panel
from freehold.report.palette import PADDING_LINE, ink_on
from freehold.report.roles import layer_of, role_of

__all__ = ["to_html"]

_SCRIPTS = ("model.js", "paint.js", "page.js")


def to_html(drawing: Drawing) -> str:
    """The page: policies side by side, one of them large, with zoom, search and hover.

    Args:
        drawing: What to show; its last panel is shown large at first.

    Returns:
        A complete document. Write it with ``encoding="utf-8"``.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> from freehold.report.drawing import make_drawing
        >>> layout = plan([ParamSpec(name="w", shape=(64, 32))], num_ranks=2)
        >>> to_html(make_drawing([layout], title="one matrix"))[:15]
        '<!doctype html>'
    """
    assets = files("freehold.report") / "assets"
    page = (assets / "page.html").read_text(encoding="utf-8")
    data = json.dumps(_record(drawing), ensure_ascii=False, separators=(",", ":"))
    values = {
        "title": escape(drawing.title),
        # A name with "</script" or "<!--" in it would end the data early; in JSON the escaped form means the same.
        "data": data.replace("<", "\\u003c"),
        "version": _version(),
        "css": (assets / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found.group(1)], page)


def _version() -> str:
    try:
        return version("freehold")
    except PackageNotFoundError:  # run from a source tree
        return ""


def _record(drawing: Drawing) -> dict[str, object]:
    params = drawing.params
    table = flop_costs(params)
    cost_of = [granule_cost(spec, table) for spec in params]
    costs = sorted(set(cost_of))  # few, and long numbers
    place = {cost: index for index, cost in enumerate(costs)}
    return {
        "ranks": drawing.num_ranks,
        "names": [spec.name for spec in params],
        "shapes": [shape_text(spec.shape) for spec in params],
        "numels": [spec.numel for spec in params],
        "granules": [spec.granule for spec in params],
        "costs": costs,
        "costOf": [place[cost] for cost in cost_of],
        "roles": [role_of(spec).code for spec in params],
        "layers": ["" if layer_of(spec) is None else str(layer_of(spec)) for spec in params],
        "paddingLine": PADDING_LINE,
        "colourings": [_colouring_record(colouring) for colouring in drawing.colourings],
        "panels": [_panel_record(panel, drawing) for panel in drawing.panels],
    }


def _colouring_record(colouring: Colouring) -> dict[str, object]:
    return {
        "name": colouring.name,
        "graded": colouring.graded,
        "swatches": [
            {"label": s.label, "code": s.code, "colour": s.colour, "ink": ink_on(s.colour)} for s in colouring.swatches
        ],
        "of": colouring.of_param,
    }


def _panel_record(panel: Panel, drawing: Drawing) -> dict[str, object]:
    report = panel.report
    return {
        "policy": report.policy,
        "numel": report.buffer_numel,
        "real": report.real_numel,
        "bound": report.lower_bound_numel,
        "makespanBound": report.makespan_lower_bound,
        "bytes": report.bytes_per_rank.total,
        "advice": report.advice,
        "cost": panel.rank_cost,
        "bands": [_band_record(band, drawing) for band in panel.bands],
        "step": None if panel.timeline is None else _step_record(panel.timeline),
    }


def _band_record(band: Band, drawing: Drawing) -> dict[str, object]:
    """Params that lie whole on a rank need three numbers each, pieces five: most of a page is these numbers."""
    whole: list[int] = []
    pieces: list[int] = []
    for block in band.blocks:
        if block.stop - block.start == drawing.params[block.param].numel:
            whole += (block.param, block.rank, block.offset)
        else:
            pieces += (block.param, block.rank, block.offset, block.start, block.stop)
    return {
        "mode": band.mode,
        "dtype": band.dtype,
        "top": band.top_numel,
        "shard": band.shard_numel,
        "real": band.real_numel,
        "whole": whole,
        "pieces": pieces,
    }


def _step_record(timeline: Timeline) -> dict[str, object]:
    return {
        "step": timeline.step_s,
        "exposed": timeline.exposed_comm_s,
        "events": [[event.kind, event.bucket, event.start_s, event.stop_s] for event in timeline.events],
    }
