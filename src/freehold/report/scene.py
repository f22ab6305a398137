"""The static picture as shapes on a canvas: what ``svg`` writes and ``png`` paints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from freehold.report.colouring import Colouring, shape_text
from freehold.report.drawing import Band, Cell, Drawing, Panel, band_cells
from freehold.report.measure import LayoutReport
from freehold.report.palette import ink_on
from freehold.report.roles import layer_of

__all__ = ["Align", "Box", "Hatch", "Line", "Scene", "Shape", "Text", "make_scene", "si"]

Align = Literal["start", "middle", "end"]

_INK = "#1B1B1B"
_SOFT = "#5A5A5A"

_MARGIN = 24
_GUTTER = 40
_GAP = 28
_TOP = 178
_MAP = 420
_LOAD = 80
_LEGEND = 84
_NARROW = 2.0
"""Columns are at least this many pixels wide; with more ranks than fit, one column shows the mean of several."""

_CHARACTER = 0.56
"""Mean width of a character over its size, to tell whether a label fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A filled rectangle; ``hint`` is shown when the mouse rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hatch:
    """A rectangle of padding."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    width: float = 1.0
    dashed: bool = False
    colour: str = _INK


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line of text, its middle at ``y``; ``upright`` text runs from bottom to top around its middle."""

    x: float
    y: float
    text: str
    size: float = 12.0
    align: Align = "start"
    bold: bool = False
    upright: bool = False
    colour: str = _INK


Shape = Box | Hatch | Line | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A picture.

    Attributes:
        title: What is shown, for a reader that cannot see it.
        width: In pixels.
        height: In pixels.
        shapes: From back to front.
    """

    title: str
    width: int
    height: int
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where a panel is drawn, and in which scale: pixels of an element of height, of a rank, of a unit of cost."""

    x: float
    y: float
    width: float
    per_numel: float
    per_rank: float
    per_cost: float
    colouring: Colouring
    drawing: Drawing

    @property
    def ranks_per_column(self) -> int:
        """How many ranks share a column."""
        return max(1, -int(-_NARROW // self.per_rank))

    def x_of(self, rank: int) -> float:
        """Where the column that begins with a rank begins."""
        return self.x + min(rank, self.drawing.num_ranks) * self.per_rank


def make_scene(drawing: Drawing, *, colour: str | None = None, width: int = 1600) -> Scene:
    """Arrange the panels of a drawing side by side, with a legend.

    Args:
        drawing: What to show.
        colour: ``"role"``, ``"layer"`` or ``"shape"``; ``None`` chooses what tells most.
        width: Of the picture in pixels.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> from freehold.report.drawing import make_drawing
        >>> layout = plan([ParamSpec(name="w", shape=(64, 32))], num_ranks=2)
        >>> scene = make_scene(make_drawing([layout], title="one matrix"))
        >>> scene.width, any(isinstance(shape, Hatch) for shape in scene.shapes)
        (1600, True)
    """
    colouring = drawing.colouring(colour)
    panels = drawing.panels
    height = _TOP + _MAP + _LOAD + _LEGEND + 60
    panel_width = (width - 2 * _MARGIN - _GAP * (len(panels) - 1)) / len(panels) - _GUTTER
    tallest = max(panel.height_numel for panel in panels)
    dearest = max(1, *(max(*panel.rank_cost, panel.report.makespan_lower_bound) for panel in panels))
    shapes: list[Shape] = [
        Box(x=0, y=0, width=width, height=height, fill="#FFFFFF"),
        Text(x=_MARGIN, y=34, text=drawing.title, size=21, bold=True),
        Text(x=_MARGIN, y=60, text=_summary(drawing), size=13, colour=_SOFT),
    ]
    for i, panel in enumerate(panels):
        frame = _Frame(
            x=_MARGIN + _GUTTER + i * (panel_width + _GUTTER + _GAP),
            y=_TOP,
            width=panel_width,
            per_numel=_MAP / tallest,
            per_rank=panel_width / drawing.num_ranks,
            per_cost=_LOAD / 1.05 / dearest,
            colouring=colouring,
            drawing=drawing,
        )
        shapes += _panel(panel, frame)
    shapes += _legend(colouring, _TOP + _MAP + _LOAD + 76, width)
    return Scene(title=drawing.title, width=width, height=height, shapes=tuple(shapes))


def si(value: float) -> str:
    """Three digits and a unit.

    Example:
        >>> si(8_030_261_248), si(12)
        ('8.03 G', '12')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - len(str(int(scaled))) + 1)}f} {unit}"
    return f"{value:g}"


def _summary(drawing: Drawing) -> str:
    real = drawing.panels[0].report.real_numel
    return (
        f"{drawing.num_ranks:,} ranks, {len(drawing.params):,} params, {si(real)} elements. Buckets down, ranks across."
    )


def _panel(panel: Panel, frame: _Frame) -> Iterator[Shape]:
    yield from _figures(panel, frame)
    right = frame.x + frame.width
    label_free = 0.0
    for index, band in enumerate(panel.bands):
        top = frame.y + band.top_numel * frame.per_numel
        height = band.shard_numel * frame.per_numel
        yield Hatch(x=frame.x, y=top, width=frame.width, height=height)
        yield from _cells(band, index, top, frame)
        yield from _separators(top, height, frame)
        for edge in (top, top + height):
            yield Line(x1=frame.x, y1=edge, x2=right, y2=edge, width=1.0 if height >= 10 else 0.3)
        if top + height / 2 - 7 >= label_free:
            yield Text(x=frame.x - 6, y=top + height / 2, text=f"{index}", size=11, align="end", colour=_SOFT)
            label_free = top + height / 2 + 7
    bound_y = frame.y + panel.report.lower_bound_numel / frame.drawing.num_ranks * frame.per_numel
    yield Line(x1=frame.x - 5, y1=bound_y, x2=right + 5, y2=bound_y, width=1.6, dashed=True)
    yield from _load(panel, frame)


def _separators(top: float, height: float, frame: _Frame) -> Iterator[Shape]:
    if frame.per_rank >= 7:
        for rank in range(1, frame.drawing.num_ranks):
            yield Box(x=frame.x_of(rank) - 0.5, y=top, width=1, height=height, fill="#FFFFFF")


def _figures(panel: Panel, frame: _Frame) -> Iterator[Shape]:
    report, timeline = panel.report, panel.timeline
    left = frame.x - _GUTTER + 12
    yield Text(x=left, y=92, text=report.policy, size=16, bold=True)
    lines = [
        f"padding {_percent(report.padding_fraction)} (bound {_percent(report.padding_fraction_lower_bound)})",
        f"busiest rank {report.makespan / max(1, report.makespan_lower_bound):.3f} times its bound",
        _memory(report),
    ]
    if timeline is not None:
        lines.append(f"step {timeline.step_s:.3g} s, {timeline.exposed_comm_s:.3g} s of it exposed")
    for row, line in enumerate(lines):
        yield Text(x=left, y=112 + 17 * row, text=line, size=12.5)


def _memory(report: LayoutReport) -> str:
    buckets = "1 bucket" if report.num_buckets == 1 else f"{report.num_buckets} buckets"
    return f"{buckets}, {si(report.bytes_per_rank.total)}B on each rank"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.{1 if fraction >= 0.0995 else 2}f} %"


def _cells(band: Band, index: int, top: float, frame: _Frame) -> Iterator[Shape]:
    step = frame.ranks_per_column
    cells = band_cells(band, frame.colouring, ranks_per_column=step)
    for cell in _merged(cells, least_numel=3 / frame.per_numel):
        x = frame.x_of(cell.column * step)
        box = Box(
            x=x,
            y=top + cell.offset * frame.per_numel,
            width=frame.x_of((cell.column + 1) * step) - x,
            height=cell.numel * frame.per_numel,
            fill=frame.colouring.swatches[cell.swatch].colour,
            hint=_hint(cell, index, frame),
        )
        yield box
        if box.height >= 4:
            y = box.y + box.height - 0.5  # inside the box: the next one covers what is below its edge
            yield Line(x1=x, y1=y, x2=x + box.width, y2=y, colour="#FFFFFF")
        if cell.params == 1:
            yield from _label(box, cell, frame)


def _merged(cells: Sequence[Cell], *, least_numel: float) -> Iterator[Cell]:
    """Neighbours of one colour too low to be told apart become one cell, or a file may have 100,000 of them."""
    held: Cell | None = None
    for cell in cells:
        if (
            held is not None
            and (held.column, held.swatch) == (cell.column, cell.swatch)
            and max(cell.numel, held.numel / held.params) < least_numel
            and cell.offset - held.offset - held.numel < least_numel
        ):
            numel = cell.offset + cell.numel - held.offset
            held = Cell(
                column=held.column,
                swatch=held.swatch,
                offset=held.offset,
                numel=numel,
                params=held.params + cell.params,
                first=held.first,
            )
            continue
        if held is not None:
            yield held
        held = cell
    if held is not None:
        yield held


def _hint(cell: Cell, index: int, frame: _Frame) -> str:
    step = frame.ranks_per_column
    first, last = cell.column * step, min((cell.column + 1) * step, frame.drawing.num_ranks) - 1
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    spec = frame.drawing.params[cell.first]
    if cell.params == 1:
        return f"{spec.name}, {shape_text(spec.shape)}, bucket {index}, {ranks}"
    return f"{cell.params} params, {spec.name} and others, bucket {index}, {ranks}"


def _label(box: Box, cell: Cell, frame: _Frame) -> Iterator[Text]:
    if min(box.height, box.width) < 11:
        return
    upright = box.height > 2 * box.width or box.width < 16
    room = (box.height if upright else box.width) - 6
    spec = frame.drawing.params[cell.first]
    code, layer = frame.colouring.swatches[cell.swatch].code, layer_of(spec)
    prefix = "" if layer is None or frame.colouring.name == "layer" else f"{layer} "
    shape = shape_text(spec.shape)
    for text in (f"{prefix}{code} {shape}" if code != shape else "", prefix + code, code):
        if text and len(text) * 9.5 * _CHARACTER <= room:
            yield Text(
                x=box.x + box.width / 2,
                y=box.y + box.height / 2,
                text=text,
                size=9.5,
                align="middle",
                upright=upright,
                colour=ink_on(box.fill),
            )
            return


def _load(panel: Panel, frame: _Frame) -> Iterator[Shape]:
    base = _TOP + _MAP + 14 + _LOAD
    step, gap = frame.ranks_per_column, 1.0 if frame.per_rank >= 7 else 0.0
    for rank in range(0, frame.drawing.num_ranks, step):
        costs = panel.rank_cost[rank : rank + step]
        x = frame.x_of(rank)
        width = frame.x_of(rank + step) - x - gap
        # The dearest of the column's ranks behind, their mean before it.
        for cost, fill in ((max(costs), "#A9A9A9"), (sum(costs) / len(costs), "#4D4D4D")):
            height = cost * frame.per_cost
            hint = f"ranks {rank} to {rank + len(costs) - 1}" if len(costs) > 1 else f"rank {rank}"
            yield Box(x=x, y=base - height, width=width, height=height, fill=fill, hint=f"{hint}: load {si(cost)}")
    right = frame.x + frame.width
    yield Line(x1=frame.x, y1=base, x2=right, y2=base)
    bound_y = base - panel.report.makespan_lower_bound * frame.per_cost
    yield Line(x1=frame.x - 5, y1=bound_y, x2=right + 5, y2=bound_y, width=1.6, dashed=True)
    yield Text(x=frame.x - 18, y=base - _LOAD / 2, text="load", size=11, align="middle", upright=True, colour=_SOFT)
    last = frame.drawing.num_ranks - 1
    yield Text(x=frame.x, y=base + 12, text="rank 0", size=11, colour=_SOFT)
    if last:
        yield Text(x=right, y=base + 12, text=f"{last:,}", size=11, align="end", colour=_SOFT)


def _legend(colouring: Colouring, y: float, width: int) -> Iterator[Shape]:
    x = float(_MARGIN)
    named = colouring.swatches
    if colouring.graded:
        scale = [swatch for swatch in named if swatch.code]
        named = tuple(swatch for swatch in named if not swatch.code)
        if scale:
            yield Text(x=x, y=y, text=scale[0].label)
            x += len(scale[0].label) * 12 * _CHARACTER + 8
            for i, swatch in enumerate(scale):
                yield Box(x=x + i * 220 / len(scale), y=y - 8, width=220 / len(scale), height=16, fill=swatch.colour)
            yield Text(x=x + 228, y=y, text=scale[-1].label)
            x += 228 + len(scale[-1].label) * 12 * _CHARACTER + 24
    for swatch in named:
        yield Box(x=x, y=y - 9, width=36, height=18, fill=swatch.colour)
        if swatch.code != swatch.label:
            yield Text(x=x + 18, y=y, text=swatch.code, size=9.5, align="middle", colour=ink_on(swatch.colour))
        yield Text(x=x + 42, y=y, text=swatch.label)
        x += 42 + len(swatch.label) * 12 * _CHARACTER + 18
    yield Hatch(x=x, y=y - 9, width=36, height=18)
    yield Text(x=x + 42, y=y, text="padding")
    yield Line(x1=x + 106, y1=y, x2=x + 138, y2=y, width=1.6, dashed=True)
    yield Text(x=x + 144, y=y, text="bound: no layout has less")
    yield Text(
        x=_MARGIN,
        y=y + 28,
        text="Height is memory: elements of one rank, on one scale. Load: flops of Newton-Schulz of each "
        "rank. Numbers at the left are buckets, in the order in which they are reduced.",
        colour=_SOFT,
        size=11.5,
    )
