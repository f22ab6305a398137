"""docs/newton_schulz.md: its examples run, and its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from freehold.rules.polar.coefficients import COEFFICIENT_SETS, JORDAN
from freehold.rules.polar.forms import gram_operations, restart_steps
from freehold.rules.polar.products import MIN_HALVES_DIM
from freehold.rules.polar.variants import DTYPE_NAMES, MAX_BATCH_BYTES

TEXT = (Path(__file__).parents[2] / "docs" / "newton_schulz.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_examples_run(block: str) -> None:
    exec(compile(block, "docs/newton_schulz.md", "exec"), {})


def test_numbers_of_the_text_are_those_of_the_code() -> None:
    assert len(BLOCKS) == 2
    assert all(f'"{name}"' in TEXT for name in (*COEFFICIENT_SETS, *DTYPE_NAMES))
    assert MAX_BATCH_BYTES == 256 * 2**20
    assert f"From {MIN_HALVES_DIM} rows on" in TEXT
    schedule = (JORDAN,) * 5
    found = [sorted(restart_steps(schedule, dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert found == [[], [3], [2, 4]]  # counted from 0; the text counts from 1
    squares = [gram_operations(schedule, dtype).num_squares for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert squares == [17, 14, 11]
