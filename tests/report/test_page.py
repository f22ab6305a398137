"""The interactive page in a real browser: it loads from one file, shows what the layout says, and can be worked with.

These tests need Chromium, and fail where there is none. They are marked slow; continuous integration runs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser
from samples import layouts_of, model

from freehold.plan import Layout, ParamSpec, plan
from freehold.plan.machine import Machine, Workload
from freehold.plan.timeline import simulate
from freehold.report.colouring import shape_text
from freehold.report.drawing import make_drawing
from freehold.report.html import to_html

pytestmark = pytest.mark.slow

POLICIES = ("threshold", "absorb", "ns_cost")
MACHINE = Machine(link_bytes_per_s=50e9, matmul_flops_per_s=400e12)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    browser.resize(1440, 1400)
    yield browser
    browser.close()


class Page:
    """A page about some layouts."""

    def __init__(self, browser: Browser, folder: Path, layouts: list[Layout], *, title: str = "a model") -> None:
        workload = Workload(tokens_per_rank=8192)
        timelines = [simulate(layout, machine=MACHINE, workload=workload) for layout in layouts]
        self.browser = browser
        self.layout = layouts[-1]
        self.text = to_html(make_drawing(layouts, title=title, timelines=timelines))
        path = folder / "layout.html"
        path.write_text(self.text, encoding="utf-8")
        browser.requests.clear()
        browser.problems.clear()
        browser.open(path)
        self.address = path.resolve().as_uri()

    def js(self, expression: str) -> object:
        return self.browser.evaluate(expression)

    def place(self, rank: float, row: float) -> tuple[float, float]:
        """Where in the window a place of the layout is drawn: a rank, and elements from the top of all buckets."""
        x, y = self.browser.evaluate(
            "(() => { const { left, top } = document.getElementById('map').getBoundingClientRect();"
            " const { x, y } = freehold.scales(freehold.state.view, freehold.mapBox());"
            f" return [left + x({rank}), top + y({row})]; }})()"
        )
        return x, y

    def hover(self, rank: float, row: float) -> str:
        self.browser.mouse("mouseMoved", *self.place(rank, row))
        hidden = self.js("document.getElementById('tip').hidden")
        return "" if hidden else str(self.js("document.getElementById('tip').innerText"))

    def colour(self, rank: float, row: float) -> str:
        """The colour of the pixel there."""
        return str(
            self.js(
                "(() => { const map = document.getElementById('map'); const ratio = window.devicePixelRatio;"
                " const { x, y } = freehold.scales(freehold.state.view, freehold.mapBox());"
                f" const at = [Math.round(x({rank}) * ratio), Math.round(y({row}) * ratio)];"
                " const one = document.createElement('canvas').getContext('2d', { willReadFrequently: true });"
                " one.drawImage(map, ...at, 1, 1, 0, 0, 1, 1);"
                " const [r, g, b] = one.getImageData(0, 0, 1, 1).data;"
                " return '#' + [r, g, b].map((c) => c.toString(16).padStart(2, '0')).join('').toUpperCase(); })()"
            )
        )

    def change(self, element: str, value: str, event: str) -> None:
        self.js(
            f"(() => {{ const it = document.getElementById('{element}'); it.value = {json.dumps(value)};"
            f" it.dispatchEvent(new Event('{event}')); }})()"
        )


@pytest.fixture
def llama(browser: Browser, tmp_path: Path) -> Page:
    return Page(browser, tmp_path, layouts_of(model("llama-3-8b"), 8, *POLICIES), title="Llama-3-8B")


def tops(layout: Layout) -> list[int]:
    found = [0]
    for bucket in layout.buckets:
        found.append(found[-1] + bucket.shard_numel)
    return found


def test_the_page_needs_no_other_file_and_no_network(llama: Page) -> None:
    assert llama.browser.requests == [llama.address]
    assert llama.browser.problems == []
    assert "http" not in llama.text.replace("http-equiv", "")
    assert llama.js("document.title") == "Llama-3-8B \u00b7 layout"


def test_cards_show_the_figures_of_every_policy(llama: Page) -> None:
    cards = str(llama.js("[...document.querySelectorAll('.card')].map((card) => card.innerText).join('|')")).split("|")
    assert [card.split("\n")[0].replace("shown below", "") for card in cards if card]
    for card, policy in zip(cards, POLICIES, strict=True):
        assert policy in card
        assert "padding" in card
        assert "bound 0.00 %" in card
    layout = llama.layout
    assert f"{100 * layout.padding_numel / layout.real_numel:.2f} %" in cards[-1]
    assert llama.js("document.querySelector('[aria-checked=true]').id") == "card-2"


def test_pointing_at_any_block_tells_its_param(llama: Page) -> None:
    layout = llama.layout
    specs = {spec.name: spec for spec in layout.params}
    for bucket, top in list(zip(layout.buckets, tops(layout), strict=False))[1:6]:
        for slot in bucket.slots[::3]:
            if slot.numel < bucket.shard_numel / 10:
                continue
            tip = llama.hover(slot.rank + 0.5, top + slot.offset + slot.numel / 2)
            lines = tip.split("\n")
            assert lines[0] == slot.name
            assert f"shape\t{shape_text(specs[slot.name].shape)}" in lines
            assert f"bucket\t{bucket.index} ({bucket.mode}, bfloat16)" in lines
            assert f"offset\t{slot.offset:,} in the shard" in lines
            assert any(line.startswith(f"owner\trank {slot.rank}") for line in lines)
            assert any(line.startswith("cost\t") for line in lines)


def test_padding_says_how_much_it_is(llama: Page) -> None:
    bucket = llama.layout.buckets[1]
    rank = min(range(8), key=lambda r: sum(slot.numel for slot in bucket.slots_of_rank(r)))
    empty = bucket.shard_numel - sum(slot.numel for slot in bucket.slots_of_rank(rank))
    assert empty > 0
    tip = llama.hover(rank + 0.5, tops(llama.layout)[2] - empty / 2)
    assert tip.startswith("padding")
    assert f"{empty:,} elements" in tip


def test_pixels_have_the_colours_of_the_legend(llama: Page) -> None:
    layout = llama.layout
    drawing = make_drawing([layout], title="")
    colouring = drawing.colouring("role")
    of = {spec.name: colouring.swatches[i] for spec, i in zip(layout.params, colouring.of_param, strict=True)}
    bucket, top = layout.buckets[1], tops(layout)[1]
    seen: set[str] = set()
    for slot in bucket.slots:
        # Near the left edge: clear of labels and separators.
        found = llama.colour(slot.rank + 0.02, top + slot.offset + slot.numel * 0.3)
        assert found == of[slot.name].colour
        seen.add(of[slot.name].code)
    assert len(seen) >= 3
    wanted = next(iter(bucket.slots))
    llama.change("find", wanted.name, "input")
    assert llama.js("document.getElementById('found').textContent") == "1 params"
    for slot in bucket.slots:
        found = llama.colour(slot.rank + 0.02, top + slot.offset + slot.numel * 0.3)
        assert found == (of[slot.name].colour if slot.name == wanted.name else "#ECECEC")


def test_the_legend_picks_out_a_class(llama: Page) -> None:
    entry = "document.querySelector('#legend button')"
    assert llama.js(f"{entry}.innerText").endswith("mlp up, gate")  # type: ignore[attr-defined]
    llama.js(f"{entry}.click()")
    assert llama.js(f"{entry}.getAttribute('aria-pressed')") == "true"
    wanted = llama.js("freehold.model.names.filter((name) => /up_proj|gate_proj/.test(name)).length")
    assert wanted == 64
    top = tops(llama.layout)[1]
    dims = [llama.colour(s.rank + 0.02, top + s.offset + s.numel * 0.3) for s in llama.layout.buckets[1].slots]
    ups = ["up_proj" in s.name or "gate_proj" in s.name for s in llama.layout.buckets[1].slots]
    assert [colour != "#ECECEC" for colour in dims] == ups


def test_another_policy_can_be_chosen_by_mouse_and_found_by_keyboard(llama: Page) -> None:
    x, y = llama.browser.evaluate(
        "(() => { const { left, top } = document.getElementById('card-0').getBoundingClientRect();"
        " return [left + 30, top + 20]; })()"
    )
    llama.browser.click(x, y)
    assert str(llama.js("document.getElementById('detail-title').textContent")).startswith("threshold: ")
    assert llama.js("document.activeElement.id") == "card-0"


def test_zooming_moving_and_coming_back(llama: Page) -> None:
    def view() -> dict[str, float]:
        return llama.browser.evaluate("({ ...freehold.state.view })")

    layout, whole = llama.layout, view()
    assert whole == {"x0": 0, "x1": 8, "y0": 0, "y1": layout.numel // 8}
    spot = (2.0, tops(layout)[3])
    before = llama.place(*spot)
    for _ in range(3):
        llama.browser.mouse("mouseWheel", *before, deltaX=0, deltaY=-100)
    zoomed = view()
    assert zoomed["x1"] - zoomed["x0"] < 0.6 * 8
    assert llama.place(*spot) == pytest.approx(before, abs=1)  # what the mouse points at stays there
    llama.browser.mouse("mousePressed", *before, button="left", clickCount=1)
    llama.browser.mouse("mouseMoved", before[0] + 60, before[1] + 40, button="left")
    llama.browser.mouse("mouseReleased", before[0] + 60, before[1] + 40, button="left", clickCount=1)
    assert llama.place(*spot) == pytest.approx((before[0] + 60, before[1] + 40), abs=1)
    llama.js("document.getElementById('reset').click()")
    assert view() == whole
    llama.browser.click(*llama.place(4, (tops(layout)[2] + tops(layout)[3]) / 2), count=2)
    assert view() == {"x0": 0, "x1": 8, "y0": tops(layout)[2], "y1": tops(layout)[3]}


def test_a_thousand_ranks_are_shown_in_groups_and_found_one_by_one(browser: Browser, tmp_path: Path) -> None:
    page = Page(browser, tmp_path, layouts_of(model("deepseek-v3"), 1000, "threshold", "ns_cost"))
    layout = page.layout
    assert browser.problems == []
    assert len(page.text) < 3_000_000
    # Areas: what the groups of ranks show adds up to the elements of the model.
    shown = page.js(
        "freehold.model.panels.at(-1).bands.map((band) =>"
        " freehold.columnsOf(band, freehold.model.colourings[0], 8, () => true)"
        ".flat().reduce((sum, cell) => sum + cell.numel * 8, 0)).reduce((a, b) => a + b)"
    )
    assert shown == pytest.approx(layout.real_numel, rel=1e-9)
    bucket = layout.buckets[0]
    large = [slot for slot in bucket.slots if slot.numel > bucket.shard_numel / 20]
    for slot in large[:: len(large) // 8]:
        assert page.hover(slot.rank + 0.5, slot.offset + slot.numel / 2).startswith(slot.name)
    painted_ms = page.js("(() => { const start = performance.now(); paintAll(); return performance.now() - start; })()")
    assert float(str(painted_ms)) < 2000


def test_forty_five_thousand_matrices_load_and_paint(browser: Browser, tmp_path: Path) -> None:
    params = [ParamSpec(name=f"layers.{i // 768}.mlp.experts.{i % 768}", shape=(64, 32)) for i in range(45_000)]
    page = Page(browser, tmp_path, [plan(params, num_ranks=1000, policy="threshold")])
    assert browser.problems == []
    assert len(page.text) < 4_000_000
    assert page.hover(500.5, 1024).startswith("layers.")
    painted_ms = page.js("(() => { const start = performance.now(); paintAll(); return performance.now() - start; })()")
    assert float(str(painted_ms)) < 2000


def test_names_are_text_and_never_markup(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><script>document.title='taken'</script><!--<img src=x onerror=document.title='taken'>{{data}}"
    layout = plan([ParamSpec(name=evil, shape=(64, 64)), ParamSpec(name="b", shape=(64, 64))], num_ranks=1)
    page = Page(browser, tmp_path, [replace(layout)], title="<b>bold</b> & {{data}}")
    assert browser.problems == []
    assert page.js("document.title") == "<b>bold</b> & {{data}} \u00b7 layout"
    assert page.js("document.querySelector('h1').textContent") == "<b>bold</b> & {{data}}"
    assert page.hover(0.5, 4096 * 1.5).split("\n")[0] == evil
    assert page.browser.requests == [page.address]


def test_a_simulated_step_is_drawn_and_left_out_without_one(browser: Browser, tmp_path: Path) -> None:
    layouts = layouts_of(model("gpt2"), 8, "ns_cost")
    page = Page(browser, tmp_path, layouts)
    assert page.js("document.getElementById('step').hidden") is False
    assert "One step, simulated: " in str(page.js("document.getElementById('step-title').textContent"))
    plain = tmp_path / "plain.html"
    plain.write_text(to_html(make_drawing(layouts, title="gpt2")), encoding="utf-8")
    browser.open(plain)
    assert browser.evaluate("document.getElementById('step').hidden") is True
    assert browser.problems == []
