from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.rules import AdamW, Span


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    numel=st.integers(1, 3000),
    cuts=st.sets(st.integers(1, 46), max_size=4),
    seed=st.integers(0, 2**31),
    first_step=st.integers(1, 10_000),
)
def test_a_param_cut_over_ranks_has_the_bits_of_torch(numel: int, cuts: set[int], seed: int, first_step: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, grad, exp_avg = (torch.randn(numel, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(numel, generator=generator)
    param = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([param], lr=0.01)
    optimizer.state[param] = {
        "step": torch.tensor(float(first_step - 1)),
        "exp_avg": exp_avg.clone(),
        "exp_avg_sq": exp_avg_sq.clone(),
    }
    param.grad = grad.clone()
    optimizer.step()
    edges = [0, *sorted(64 * cut for cut in cuts if 64 * cut < numel), numel]
    rule = AdamW(lr=0.01)
    for begin, end in itertools.pairwise(edges):
        state = {"exp_avg": exp_avg[begin:end], "exp_avg_sq": exp_avg_sq[begin:end]}
        span = Span(param=start[begin:end], grad=grad[begin:end], state=state, blocks=(), step=first_step)
        rule.update(span, rule.defaults())
    assert torch.equal(start, param)
    assert torch.equal(exp_avg, optimizer.state[param]["exp_avg"])
    assert torch.equal(exp_avg_sq, optimizer.state[param]["exp_avg_sq"])


def test_bias_correction_uses_the_step_that_is_given(flat_params: Any) -> None:
    moves: dict[int, float] = {}
    for step in (1, 100_000):
        flat = flat_params.of(AdamW(lr=0.5, weight_decay=0.0), [torch.zeros(1)])
        flat.update([torch.full((1,), 3.0)], step)
        moves[step] = float(flat.param[0])
    assert moves[1] == pytest.approx(-0.5, rel=1e-6)  # m / sqrt(v) = 1 after correction
    assert moves[100_000] == pytest.approx(-0.5 * 0.1 / 0.001**0.5, rel=1e-4)  # no correction is left


def test_b36_many_small_steps_add_up_in_the_precision_of_the_span(flat_params: Any) -> None:
    # with a constant gradient every step moves by lr; in bfloat16 a weight of 1 would not move at all
    flat = flat_params.of(AdamW(lr=1e-3, weight_decay=0.0), [torch.ones(4)])
    for step in range(1, 101):
        flat.update([torch.ones(4)], step)
    torch.testing.assert_close(flat.split(flat.param)[0], torch.full((4,), 0.9), rtol=1e-5, atol=0)
    assert flat.split(flat.param)[0].bfloat16().tolist() == [0.8984375] * 4
