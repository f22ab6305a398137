"""The picture as plain data: blocks of params in buckets, how they are coloured, and how much each rank has to do.

Both renderings, the page (``html``) and the static picture (``scene``, ``svg``, ``png``), draw this and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freehold.errors import LayoutError
from freehold.plan.bucket import Bucket, Mode
from freehold.plan.cost import flop_costs, rank_costs
from freehold.plan.layout import Layout
from freehold.plan.spec import ParamSpec
from freehold.plan.timeline import Timeline
from freehold.report.colouring import Colouring, make_colourings
from freehold.report.measure import LayoutReport, measure

__all__ = ["Band", "Block", "Cell", "Drawing", "Panel", "band_cells", "make_drawing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A slot: elements ``start`` to ``stop`` of a param (by index), at ``offset`` of a rank's shard."""

    param: int
    rank: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A bucket, as a band over all ranks.

    Attributes:
        mode: ``"whole"`` or ``"flat"``.
        dtype: Element type.
        num_ranks: Ranks that it lies over.
        top_numel: Elements of a rank's shards in the bands above.
        shard_numel: Height of the band.
        real_numel: Elements of params in it, over all ranks.
        blocks: By rank and offset.
    """

    mode: Mode
    dtype: str
    num_ranks: int
    top_numel: int
    shard_numel: int
    real_numel: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One layout.

    Attributes:
        report: Its figures, and what no layout can beat.
        bands: Buckets in the order in which they are reduced.
        rank_cost: Newton-Schulz work of each rank.
        timeline: One simulated step, if there is one.
    """

    report: LayoutReport
    bands: tuple[Band, ...]
    rank_cost: tuple[int, ...]
    timeline: Timeline | None

    @property
    def height_numel(self) -> int:
        """Elements of a rank in all buckets."""
        return sum(band.shard_numel for band in self.bands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Layouts of the same params over the same ranks, side by side.

    Attributes:
        title: What is drawn.
        num_ranks: Columns.
        params: In model order.
        colourings: The first one is shown at first.
        panels: The layouts.
    """

    title: str
    num_ranks: int
    params: tuple[ParamSpec, ...]
    colourings: tuple[Colouring, ...]
    panels: tuple[Panel, ...]

    def colouring(self, name: str | None) -> Colouring:
        """A colouring by name; ``None`` is the first one."""
        for colouring in self.colourings:
            if name in (None, colouring.name):
                return colouring
        raise LayoutError(f"colour must be one of {[c.name for c in self.colourings]}, got {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Part of a band that one rectangle shows.

    Attributes:
        column: Which group of ranks.
        swatch: Index into the colouring.
        offset: Where it begins in the shard.
        numel: Its height: elements of a rank, the mean over the column's ranks.
        params: How many params have elements in it.
        first: Index of the first of them.
    """

    column: int
    swatch: int
    offset: float
    numel: float
    params: int
    first: int


def make_drawing(
    layouts: Sequence[Layout],
    *,
    title: str,
    reports: Sequence[LayoutReport] = (),
    timelines: Sequence[Timeline] = (),
) -> Drawing:
    """Put layouts side by side.

    Args:
        layouts: At least one, all of the same params and ranks.
        title: What is drawn, a model's name for example.
        reports: The figures of each layout; measured here if there are none.
        timelines: A simulated step of each layout, or nothing.

    Raises:
        LayoutError: No layout; layouts of different params or ranks; too few or too many reports or timelines.

    Example:
        >>> from freehold.plan import plan
        >>> params = [ParamSpec(name=f"layers.{i}.mlp.up_proj", shape=(64, 32)) for i in range(6)]
        >>> drawing = make_drawing(
        ...     [plan(params, num_ranks=4, policy=policy) for policy in ("threshold", "ns_cost")], title="six layers")
        >>> [panel.report.policy for panel in drawing.panels], [colouring.name for colouring in drawing.colourings]
        (['threshold', 'ns_cost'], ['role', 'layer', 'shape'])
    """
    if not layouts:
        raise LayoutError("layouts is empty: there is nothing to draw")
    for name, given in (("report", reports), ("timeline", timelines)):
        if len(given) not in (0, len(layouts)):
            raise LayoutError(f"expected a {name} for each of {len(layouts)} layouts or none, got {len(given)}")
    first = layouts[0]
    for layout in layouts[1:]:
        if (layout.params, layout.num_ranks) != (first.params, first.num_ranks):
            raise LayoutError(f"layouts of {layout.policy!r} and {first.policy!r} are not of the same params and ranks")
    figures = reports or [measure(layout, plan_s=0.0) for layout in layouts]
    steps = timelines or [None] * len(layouts)
    return Drawing(
        title=title,
        num_ranks=first.num_ranks,
        params=first.params,
        colourings=make_colourings(first.params),
        panels=tuple(_panel(*one) for one in zip(layouts, figures, steps, strict=True)),
    )


def band_cells(band: Band, colouring: Colouring, *, ranks_per_column: int) -> list[Cell]:
    """The rectangles of a band.

    With one rank a column these are the blocks, where they are. With more, each column shows what its ranks hold in
    the mean, one rectangle a swatch piled up from the top, so that areas stay true and what is left of the column is
    padding.

    Example:
        >>> blocks = tuple(Block(param=p, rank=p, offset=0, start=0, stop=100) for p in range(2))
        >>> band = Band(
        ...     mode="whole", dtype="float32", num_ranks=2, top_numel=0, shard_numel=128, real_numel=200, blocks=blocks)
        >>> colouring = Colouring(name="role", swatches=(), of_param=(0, 0))
        >>> [(c.column, c.numel, c.params) for c in band_cells(band, colouring, ranks_per_column=2)]
        [(0, 100.0, 2)]
    """
    if ranks_per_column == 1:
        return [
            Cell(
                column=block.rank,
                swatch=colouring.of_param[block.param],
                offset=block.offset,
                numel=block.stop - block.start,
                params=1,
                first=block.param,
            )
            for block in band.blocks
        ]
    numels: dict[tuple[int, int], int] = {}
    members: dict[tuple[int, int], set[int]] = {}
    for block in band.blocks:
        key = (block.rank // ranks_per_column, colouring.of_param[block.param])
        numels[key] = numels.get(key, 0) + block.stop - block.start
        members.setdefault(key, set()).add(block.param)
    cells: list[Cell] = []
    offset = 0.0
    for (column, swatch), numel in sorted(numels.items()):
        if not cells or cells[-1].column != column:
            offset = 0.0
        mean = numel / min(ranks_per_column, band.num_ranks - column * ranks_per_column)
        params = members[column, swatch]
        cells.append(
            Cell(column=column, swatch=swatch, offset=offset, numel=mean, params=len(params), first=min(params))
        )
        offset += mean
    return cells


def _panel(layout: Layout, report: LayoutReport, timeline: Timeline | None) -> Panel:
    index = {spec.name: i for i, spec in enumerate(layout.params)}
    bands: list[Band] = []
    top_numel = 0
    for bucket in layout.buckets:
        bands.append(_band(bucket, index, top_numel))
        top_numel += bucket.shard_numel
    rank_cost = rank_costs(layout, flop_costs(layout.params))
    return Panel(report=report, bands=tuple(bands), rank_cost=rank_cost, timeline=timeline)


def _band(bucket: Bucket, index: dict[str, int], top_numel: int) -> Band:
    return Band(
        mode=bucket.mode,
        dtype=bucket.dtype,
        num_ranks=bucket.num_ranks,
        top_numel=top_numel,
        shard_numel=bucket.shard_numel,
        real_numel=bucket.real_numel,
        blocks=tuple(
            Block(param=index[slot.name], rank=slot.rank, offset=slot.offset, start=slot.start, stop=slot.stop)
            for slot in bucket.slots
        ),
    )
