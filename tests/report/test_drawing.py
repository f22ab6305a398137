"""The drawing holds the whole layout, aggregation keeps areas, and colours can be told apart by everybody."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import layouts_of, model

from freehold.errors import LayoutError
from freehold.plan import Layout, ParamSpec, flop_costs, plan, rank_costs
from freehold.plan.machine import Machine, Workload
from freehold.plan.timeline import simulate
from freehold.report.colouring import make_colourings
from freehold.report.drawing import band_cells, make_drawing
from freehold.report.measure import measure
from freehold.report.palette import NO_STEP, OKABE_ITO, OTHER, graded, ink_on
from freehold.report.roles import ROLES, layer_of, role_of
from strategies import Case, cases


@settings(max_examples=40)
@given(cases(max_params=25, max_ranks=13), st.integers(1, 20))
def test_bands_and_cells_hold_every_element_once(case: Case, ranks_per_column: int) -> None:
    layout = case.plan("ns_cost")
    drawing = make_drawing([layout], title="random")
    panel = drawing.panels[0]
    top = 0
    for bucket, band in zip(layout.buckets, panel.bands, strict=True):
        assert (band.top_numel, band.shard_numel) == (top, bucket.shard_numel)
        top += band.shard_numel
        wanted: Counter[tuple[int, int]] = Counter()
        for slot in bucket.slots:
            index = [spec.name for spec in layout.params].index(slot.name)
            swatch = drawing.colourings[0].of_param[index]
            wanted[slot.rank // ranks_per_column, swatch] += slot.numel
        cells = band_cells(band, drawing.colourings[0], ranks_per_column=ranks_per_column)
        found: Counter[tuple[int, int]] = Counter()
        for cell in cells:
            ranks = min(ranks_per_column, layout.num_ranks - cell.column * ranks_per_column)
            found[cell.column, cell.swatch] += round(cell.numel * ranks)
            assert cell.offset >= 0
            assert cell.offset + cell.numel <= band.shard_numel * (1 + 1e-12)
        assert found == wanted
        assert all(before.column <= after.column for before, after in pairwise(cells))
    assert panel.height_numel == top == layout.numel // layout.num_ranks
    assert panel.rank_cost == rank_costs(layout, flop_costs(layout.params))


def test_a_cell_of_several_ranks_names_how_many_params_it_shows() -> None:
    params = [ParamSpec(name=f"layers.{i}.mlp.up_proj", shape=(64, 64)) for i in range(8)]
    drawing = make_drawing([plan(params, num_ranks=4)], title="eight")
    cells = band_cells(drawing.panels[0].bands[0], drawing.colouring("role"), ranks_per_column=4)
    assert [(cell.params, cell.numel, cell.offset) for cell in cells] == [(8, 2 * 4096, 0)]


def test_figures_come_from_the_reports() -> None:
    layouts = layouts_of(model("gpt2"), 8, "threshold", "ns_cost")
    drawing = make_drawing(layouts, title="gpt2")
    assert [panel.report for panel in drawing.panels] == [measure(layout, plan_s=0.0) for layout in layouts]
    marked = [replace(panel.report, plan_s=7.0) for panel in drawing.panels]
    again = make_drawing(layouts, title="gpt2", reports=marked)
    assert [panel.report.plan_s for panel in again.panels] == [7.0, 7.0]


def test_layouts_that_do_not_belong_together_are_refused() -> None:
    params = [ParamSpec(name="a", shape=(8, 8)), ParamSpec(name="b", shape=(8, 8))]
    two, three = plan(params, num_ranks=2), plan(params, num_ranks=3)
    machine = Machine(link_bytes_per_s=1e9, matmul_flops_per_s=1e9)
    timeline = simulate(two, machine=machine, workload=Workload(tokens_per_rank=1))
    with pytest.raises(LayoutError, match="nothing to draw"):
        make_drawing(list[Layout](), title="")
    with pytest.raises(LayoutError, match="not of the same params and ranks"):
        make_drawing([two, three], title="")
    with pytest.raises(LayoutError, match="not of the same params and ranks"):
        make_drawing([two, plan(params[:1], num_ranks=2)], title="")
    with pytest.raises(LayoutError, match="a timeline for each of 2 layouts or none, got 1"):
        make_drawing([two, two], title="", timelines=[timeline])
    with pytest.raises(LayoutError, match=r"colour must be one of \['shape', 'layer', 'role'\], got 'size'"):
        make_drawing([two], title="").colouring("size")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("model.embed_tokens.weight", "embedding, head"),
        ("transformer.wpe.weight", "embedding, head"),
        ("lm_head.weight", "embedding, head"),
        ("model.layers.0.self_attn.q_proj.weight", "attention in (q, k, v)"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "attention in (q, k, v)"),
        ("transformer.h.0.attn.c_attn.weight", "attention in (q, k, v)"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "attention in (q, k, v)"),
        ("model.layers.0.self_attn.o_proj.weight", "attention out"),
        ("transformer.h.0.attn.c_proj.weight", "attention out"),
        ("decoder.layers.0.self_attention.linear_proj.weight", "attention out"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp up, gate"),
        ("transformer.h.0.mlp.c_fc.weight", "mlp up, gate"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "mlp up, gate"),
        ("model.layers.0.mlp.down_proj.weight", "mlp down"),
        ("transformer.h.0.mlp.c_proj.weight", "mlp down"),
        ("decoder.layers.0.mlp.linear_fc2.weight", "mlp down"),
        ("model.layers.0.mlp.experts.gate_up_proj", "expert up, gate"),
        ("model.layers.0.mlp.shared_experts.down_proj.weight", "expert down"),
        ("model.layers.0.mlp.gate.weight", "norm, bias, router"),
        ("model.layers.0.self_attn.q_norm.weight", "norm, bias, router"),
        ("transformer.h.0.attn.c_attn.bias", "norm, bias, router"),
        ("matrix.17", "other"),
    ],
)
def test_roles_are_read_from_names(name: str, label: str) -> None:
    assert role_of(ParamSpec(name=name, shape=(8, 8))).label == label


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.12.mlp.experts.3.w2", 12), ("transformer.h.0.ln_1.weight", 0), ("3", 3), ("lm_head.weight", None)],
)
def test_layers_are_read_from_names(name: str, layer: int | None) -> None:
    assert layer_of(ParamSpec(name=name, shape=(8, 8))) == layer


def test_without_telling_names_shapes_are_coloured_first() -> None:
    named = make_colourings(model("gpt2"))
    nameless = make_colourings([ParamSpec(name=f"matrix.{i}", shape=(i + 1, 8)) for i in range(12)])
    assert [colouring.name for colouring in named] == ["role", "layer", "shape"]
    assert [colouring.name for colouring in nameless] == ["shape", "layer", "role"]
    shapes = nameless[0]
    assert [swatch.colour for swatch in shapes.swatches] == [*OKABE_ITO, OTHER]
    assert shapes.swatches[-1].label == "5 other shapes"
    assert shapes.swatches[shapes.of_param[11]].colour == OKABE_ITO[0]  # the largest
    assert shapes.swatches[shapes.of_param[0]].colour == OTHER


# -- colour-blind people ----------------------------------------------------------------------------------------------

Rgb = tuple[float, float, float]

# Severity 1.0, on linear RGB: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color
# Vision Deficiency", IEEE TVCG 15 (2009), table 1.
DEFICIENCIES: dict[str, tuple[Rgb, Rgb, Rgb]] = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}

TO_XYZ: tuple[Rgb, Rgb, Rgb] = (
    (0.4124, 0.3576, 0.1805),
    (0.2126, 0.7152, 0.0722),
    (0.0193, 0.1192, 0.9505),
)


def times(matrix: tuple[Rgb, Rgb, Rgb], vector: Rgb) -> Rgb:
    x, y, z = (sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
    return x, y, z


def lab(colour: str, deficiency: str) -> Rgb:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    seen = times(DEFICIENCIES[deficiency], (r, g, b))
    xyz = times(TO_XYZ, (min(1, max(0, seen[0])), min(1, max(0, seen[1])), min(1, max(0, seen[2]))))
    x, y, z = (
        (v / white) ** (1 / 3) if v / white > 0.008856 else 7.787 * v / white + 16 / 116
        for v, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one: str, other: str, deficiency: str) -> float:
    return sum((a - b) ** 2 for a, b in zip(lab(one, deficiency), lab(other, deficiency), strict=True)) ** 0.5


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_classes_stay_apart(deficiency: str) -> None:
    """CIE76 differences; 2.3 is just noticeable, and 10 is seen at a glance."""
    for one, other in combinations((*OKABE_ITO, OTHER), 2):
        assert difference(one, other, deficiency) > 15, (one, other)


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_layers_grow_lighter(deficiency: str) -> None:
    lightness = [lab(colour, deficiency)[0] for colour in graded(30)]
    assert all(after > before for before, after in pairwise(lightness))
    assert min(difference(NO_STEP, colour, deficiency) for colour in graded(30)) > 10


def test_labels_can_be_read_on_every_colour() -> None:
    def luminance(colour: str) -> float:
        return ((lab(colour, "none")[0] + 16) / 116) ** 3

    for colour in (*OKABE_ITO, OTHER, NO_STEP, *graded(40)):
        low, high = sorted((luminance(colour), luminance(ink_on(colour))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour  # WCAG 2.2, 1.4.3


def test_roles_have_labels_and_codes_of_their_own() -> None:
    assert len({role.label for role in ROLES}) == len({role.code for role in ROLES}) == len(ROLES)
