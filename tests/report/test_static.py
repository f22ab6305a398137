"""SVG and PNG: well formed, true to scale, small enough, and showing what the layout says."""

from __future__ import annotations

import io
from collections import Counter
from xml.etree import ElementTree

import pytest
from PIL import Image
from samples import layouts_of, model

from freehold.plan import ParamSpec, plan
from freehold.plan.machine import Machine, Workload
from freehold.plan.timeline import simulate
from freehold.report.colouring import shape_text
from freehold.report.drawing import Drawing, make_drawing
from freehold.report.palette import PADDING_LINE
from freehold.report.png import to_png
from freehold.report.scene import Box, Hatch, Text, make_scene, si
from freehold.report.svg import to_svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def gpt2() -> Drawing:
    return make_drawing(layouts_of(model("gpt2"), 8, "threshold", "absorb", "ns_cost"), title="GPT-2 & <friends>")


@pytest.fixture(scope="module")
def thousand() -> Drawing:
    return make_drawing(layouts_of(model("deepseek-v3"), 1000, "threshold", "ns_cost"), title="DeepSeek-V3")


def areas(drawing: Drawing) -> Counter[str]:
    """Area of each colour of the legend in the maps of a picture, its legend left out."""
    scene = make_scene(drawing)
    legend = max(shape.y for shape in scene.shapes if isinstance(shape, Hatch))
    colours = {swatch.colour for swatch in drawing.colouring(None).swatches}
    found: Counter[str] = Counter()
    for shape in scene.shapes:
        if isinstance(shape, Box) and shape.fill in colours and shape.y < legend - 20:
            found[shape.fill] += shape.width * shape.height
    return found


@pytest.mark.parametrize("sample", ["gpt2", "thousand"])
def test_areas_are_elements(sample: str, request: pytest.FixtureRequest) -> None:
    """Every colour covers its share of the elements, whether blocks or groups of ranks are drawn."""
    drawing: Drawing = request.getfixturevalue(sample)
    colouring = drawing.colouring(None)
    numels: Counter[str] = Counter()
    for spec, swatch in zip(drawing.params, colouring.of_param, strict=True):
        numels[colouring.swatches[swatch].colour] += spec.numel * len(drawing.panels)
    found = areas(drawing)
    per_element = sum(found.values()) / sum(numels.values())
    for colour, numel in numels.items():
        assert found[colour] == pytest.approx(numel * per_element, rel=1e-6), colour


def test_padding_is_what_the_colours_leave_of_the_hatching(gpt2: Drawing) -> None:
    scene = make_scene(gpt2)
    hatched = [shape for shape in scene.shapes if isinstance(shape, Hatch)][:-1]
    covered = sum(areas(gpt2).values())
    total = sum(shape.width * shape.height for shape in hatched)
    real = sum(panel.report.real_numel for panel in gpt2.panels)
    buffers = sum(panel.report.buffer_numel for panel in gpt2.panels)
    assert buffers > real
    assert covered / total == pytest.approx(real / buffers, rel=1e-6)


def test_svg_is_well_formed_and_names_every_matrix(gpt2: Drawing) -> None:
    root = ElementTree.fromstring(to_svg(gpt2))
    assert root.find(f"{SVG}title") is not None
    assert root.findtext(f"{SVG}title") == "GPT-2 & <friends>"
    hints = [hint.text or "" for hint in root.iter(f"{SVG}title")]
    for spec in gpt2.params:
        if spec.rule == "matrix":
            assert sum(hint.startswith(f"{spec.name}, ") for hint in hints) >= len(gpt2.panels), spec.name
    words = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    for panel in gpt2.panels:
        assert panel.report.policy in words
    assert "padding" in words
    assert "mlp down" in words
    alone = to_svg(make_drawing(layouts_of(model("gpt2"), 8, "ns_cost"), title=""))
    assert f">11 qkv {shape_text((768, 2304))}</text>" in alone


def test_the_figures_of_a_simulated_step_are_shown() -> None:
    layouts = layouts_of(model("gpt2"), 8, "ns_cost")
    machine = Machine(link_bytes_per_s=25e9, matmul_flops_per_s=100e12)
    timelines = [simulate(layout, machine=machine, workload=Workload(tokens_per_rank=4096)) for layout in layouts]
    scene = make_scene(make_drawing(layouts, title="", timelines=timelines))
    wanted = f"step {timelines[0].step_s:.3g} s, {timelines[0].exposed_comm_s:.3g} s of it exposed"
    assert wanted in [shape.text for shape in scene.shapes if isinstance(shape, Text)]


def test_a_thousand_ranks_stay_a_small_picture(thousand: Drawing) -> None:
    svg = to_svg(thousand)
    assert len(svg) < 1_000_000
    assert "params, model.layers." in svg
    narrowest = min(box.width for box in make_scene(thousand).shapes if isinstance(box, Box))
    assert narrowest >= 0.5


@pytest.mark.slow
def test_forty_five_thousand_matrices_are_merged_where_they_cannot_be_told_apart() -> None:
    params = [ParamSpec(name=f"layers.{i // 768}.experts.{i % 768}", shape=(64, 32)) for i in range(45_000)]
    drawing = make_drawing([plan(params, num_ranks=16, policy="threshold")], title="many")
    scene = make_scene(drawing, colour="role")
    assert len(scene.shapes) < 2_000
    assert areas(drawing).total() > 0


@pytest.mark.parametrize("colour", ["role", "layer", "shape"])
def test_every_colouring_can_be_drawn(gpt2: Drawing, colour: str) -> None:
    swatches = {swatch.colour for swatch in gpt2.colouring(colour).swatches}
    used = {shape.fill for shape in make_scene(gpt2, colour=colour).shapes if isinstance(shape, Box)}
    assert swatches <= used


def test_png_shows_blocks_and_padding_where_they_are() -> None:
    """Three equal matrices on four ranks: three coloured columns and a hatched one."""
    params = [ParamSpec(name=f"layers.{i}.mlp.up_proj", shape=(64, 64)) for i in range(3)]
    drawing = make_drawing([plan(params, num_ranks=4, policy="threshold")], title="three")
    image = Image.open(io.BytesIO(to_png(drawing, width=800, scale=2))).convert("RGB")
    scene = make_scene(drawing, width=800)
    assert image.size == (scene.width * 2, scene.height * 2)
    area = next(shape for shape in scene.shapes if isinstance(shape, Hatch))
    colour = drawing.colouring(None).swatches[0].colour
    wanted = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    line = tuple(int(PADDING_LINE[i : i + 2], 16) for i in (1, 3, 5))
    for rank in range(4):
        x, y = 2 * (area.x + area.width * (rank + 0.25) / 4), 2 * (area.y + area.height / 4)
        patch = image.crop((round(x), round(y), round(x) + 40, round(y) + 40))
        colours = {pixel for _, pixel in patch.getcolors(maxcolors=10_000) or []}
        assert colours == ({wanted} if rank < 3 else {(255, 255, 255), line}), rank


def test_numbers_keep_three_digits() -> None:
    assert [si(n) for n in (0, 12, 999, 1_234, 45_600, 789_000_000, 8_030_261_248)] == [
        "0", "12", "999", "1.23 k", "45.6 k", "789 M", "8.03 G"
    ]  # fmt: skip
