"""Hypothesis strategies for planning problems: one family of shapes a problem, as in real models, or a mix."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from freehold.plan import Layout, ParamSpec, Policy, plan

__all__ = ["Case", "cases", "whole_cases"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of ``plan`` but for the policy."""

    params: tuple[ParamSpec, ...]
    num_ranks: int
    bucket_numel: int | str | None
    high_busbw: bool = False

    def plan(self, policy: str | Policy) -> Layout:
        return plan(
            self.params,
            num_ranks=self.num_ranks,
            bucket_numel=self.bucket_numel,
            policy=policy,
            high_busbw=self.high_busbw,
        )


def _matrices(sizes: SearchStrategy[int]) -> SearchStrategy[Shape]:
    return st.tuples(sizes, sizes)


EVEN = st.sampled_from([8, 16, 32, 64, 128, 256])
ODD = st.integers(0, 60).map(lambda half: 2 * half + 1)
ANY = st.integers(1, 200)
STACKS = st.tuples(st.integers(1, 12), EVEN, EVEN)
ODD_STACKS = st.tuples(st.integers(1, 9), ODD, ODD)


@st.composite
def _few_sizes(draw: DrawFn) -> SearchStrategy[Shape]:
    return st.sampled_from(draw(st.lists(_matrices(EVEN), min_size=1, max_size=4)))


@st.composite
def _one_giant(draw: DrawFn, count: int) -> list[Shape]:
    shapes = draw(st.lists(_matrices(st.integers(1, 40)), min_size=count, max_size=count))
    shapes[draw(st.integers(0, count - 1))] = (draw(st.integers(500, 2000)), 1024)
    return shapes


@st.composite
def _shapes(draw: DrawFn, max_params: int, *, stacks: bool) -> list[Shape]:
    count = draw(st.integers(1, max_params))
    families = ["few", "many", "odd", "giant", "equal"] + (["stacks", "odd_stacks", "mixed"] if stacks else [])
    family = draw(st.sampled_from(families))
    if family == "giant":
        return draw(_one_giant(count))
    if family == "equal":
        return [draw(_matrices(EVEN))] * count
    one = {
        "few": draw(_few_sizes()),
        "many": _matrices(ANY),
        "odd": _matrices(ODD),
        "stacks": STACKS,
        "odd_stacks": ODD_STACKS,
        "mixed": st.one_of(STACKS, _matrices(EVEN)),
    }[family]
    return draw(st.lists(one, min_size=count, max_size=count))


@st.composite
def _bucket_numel(draw: DrawFn, params: list[ParamSpec]) -> int | str | None:
    total = sum(spec.numel for spec in params)
    kind = draw(st.sampled_from(["none", "default", "one", "part", "beyond"]))
    if kind == "part":
        return draw(st.integers(1, total))
    return {"none": None, "default": "default", "one": 1, "beyond": total + 1}[kind]


@st.composite
def whole_cases(
    draw: DrawFn, *, max_params: int = 60, max_ranks: int = 33, stacks: bool = True, isolated: bool = True
) -> Case:
    """Matrices and stacks of one dtype."""
    shapes = draw(_shapes(max_params, stacks=stacks))
    alone = draw(st.sets(st.integers(0, len(shapes) - 1), max_size=2)) if isolated else set[int]()
    params = [
        ParamSpec(name=f"layers.{index}.weight", shape=shape, isolated=index in alone)
        for index, shape in enumerate(shapes)
    ]
    return Case(
        params=tuple(params),
        num_ranks=draw(st.integers(1, max_ranks)),
        bucket_numel=draw(_bucket_numel(params)),
        high_busbw=draw(st.booleans()),
    )


@st.composite
def cases(draw: DrawFn, *, max_params: int = 60, max_ranks: int = 33) -> Case:
    """As ``whole_cases``, with elementwise params between them, several dtypes and tied params."""
    case = draw(whole_cases(max_params=max_params, max_ranks=max_ranks))
    params: list[ParamSpec] = []
    for spec in case.params:
        kind = draw(st.sampled_from(["matrix", "matrix", "flat", "both", "float32", "whole vector"]))
        if kind in ("matrix", "both"):
            params.append(spec)
        if kind in ("flat", "both"):
            shape = (draw(st.integers(1, 3000)),)
            params.append(ParamSpec(name=f"{spec.name}.norm", shape=shape, rule="elementwise"))
        if kind == "float32":
            params.append(replace(spec, dtype="float32"))
        if kind == "whole vector":
            numel = draw(st.integers(1, 3000))
            params.append(ParamSpec(name=f"{spec.name}.scale", shape=(numel,), granule_numel=numel))
    for number in range(draw(st.integers(0, 2))):
        source = params[draw(st.integers(0, len(params) - 1))]
        if source.tied_to is None:
            place = draw(st.integers(0, len(params)))
            params.insert(place, replace(source, name=f"tied.{number}", tied_to=source.name, isolated=False))
    return replace(case, params=tuple(params))
