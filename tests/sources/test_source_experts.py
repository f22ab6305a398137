"""Expert parallelism: what one of N ranks holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from freehold.errors import SourceError
from freehold.plan import ParamSpec
from freehold.sources import ModelSource, experts_of_one_rank, from_inline, load_source

ZOO = Path(__file__).parents[1] / "data" / "zoo"


def test_stacked_experts_are_divided_and_the_rest_is_left_out() -> None:
    whole = load_source(str(ZOO / "qwen3-30b-a3b.json.gz"))
    part = experts_of_one_rank(whole, 8)
    assert {spec.shape for spec in part.params} == {(16, 1536, 2048), (16, 2048, 768)}
    assert len(part.params) == 96
    assert "435 other params train in another group" in part.notes[-1]


def test_stacked_biases_of_experts_are_divided_too_and_shared_experts_are_not() -> None:
    names = {spec.name for spec in experts_of_one_rank(load_source(str(ZOO / "deepseek-v3.json.gz")), 64).params}
    assert not any("shared_experts" in name for name in names)
    oss = experts_of_one_rank(load_source(str(ZOO / "gpt-oss-20b.json.gz")), 4)
    assert {spec.shape[0] for spec in oss.params} == {8}
    assert any(spec.name.endswith("bias") for spec in oss.params)


def test_numbered_experts_are_counted_per_layer() -> None:
    names = [f"layers.{layer}.experts.{expert}.up.weight" for layer in range(2) for expert in range(8)]
    whole = ModelSource(name="toy", params=tuple(ParamSpec(name=name, shape=(8, 8)) for name in names))
    kept = [spec.name for spec in experts_of_one_rank(whole, 4).params]
    assert kept == [f"layers.{layer}.experts.{expert}.up.weight" for layer in range(2) for expert in range(2)]


def test_inline_stacks_count_as_experts() -> None:
    assert experts_of_one_rank(from_inline("stack:128x16x8,4x8x8"), 8).params[0].shape == (16, 16, 8)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("stack:6x8x8", 4, "--ep 4 does not divide its 6 experts"),
        ("4x8x8", 2, "no experts found"),
        ("stack:6x8x8", 0, "--ep must be at least 1"),
    ],
)
def test_experts_that_cannot_be_divided(text: str, ranks: int, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        experts_of_one_rank(from_inline(text), ranks)
