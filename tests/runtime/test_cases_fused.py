"""Reported fault B41: fused weights, cut by rows into the matrices that they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import assert_ranks_agree, data, error_of, everywhere, weights
from ranks import run_ranks
from torch import nn

from freehold import Group, LayerwiseOptimizer, Muon
from freehold.errors import RuleError


def _fused(parts: tuple[int, ...]) -> None:
    """The same gradients to one fused weight and to its parts as params of their own; five steps, with momentum."""
    torch.manual_seed(44)
    fused = nn.Linear(16, sum(parts), bias=False)
    apart = nn.ModuleList(nn.Linear(16, rows, bias=False) for rows in parts)
    with torch.no_grad():
        for part, rows in zip(apart, fused.weight.split(parts), strict=True):
            part.weight.copy_(rows)
    groups = [Group("weight", split=parts)]
    options = {"matrix": Muon(lr=0.05, weight_decay=0.1), "elementwise": None, "bucket_numel": 1}
    one, many = LayerwiseOptimizer(fused, groups=groups, **options), LayerwiseOptimizer(apart, **options)
    for step in range(5):
        grad = data(2 * step + dist.get_rank(), sum(parts), 16)
        fused.weight.grad = grad.clone()
        for part, rows in zip(apart, grad.split(parts), strict=True):
            part.weight.grad = rows.clone()
        one.step()
        many.step()
        expected = torch.cat([part.weight.detach() for part in apart])
        assert torch.equal(weights(fused)["weight"], expected), f"{step=}"
    assert_ranks_agree(fused)


@pytest.mark.parametrize("parts", [(16, 16, 16), (24, 8, 8), (12, 12, 12, 12)])
def test_b41_a_fused_weight_is_updated_as_its_parts(parts: tuple[int, ...]) -> None:
    run_ranks(2, _fused, parts)


def _wrong_sum() -> None:
    model = nn.Sequential(nn.Linear(16, 48, bias=False))
    groups = [Group("0.weight", split=(16, 16, 15))]
    errors = everywhere(error_of(lambda: LayerwiseOptimizer(model, matrix=Muon(), elementwise=None, groups=groups)))
    assert errors[0] == errors[1]
    assert errors[0][0] == "RuleError"
    for said in ("'0.weight'", "47", "48"):
        assert said in errors[0][1]
    assert issubclass(RuleError, ValueError)


def test_b41_parts_that_do_not_add_up_are_refused_by_name() -> None:
    run_ranks(2, _wrong_sum)


def test_b41_without_a_split_a_fused_weight_is_one_matrix() -> None:
    """The documented default: orthogonalised whole, with the scale of its own shape."""
    torch.manual_seed(45)
    fused, plain = nn.Linear(16, 48, bias=False), nn.Linear(16, 48, bias=False)
    plain.load_state_dict(fused.state_dict())
    opt = LayerwiseOptimizer(fused, matrix=Muon(lr=0.05), elementwise=None)
    reference = torch.optim.Muon(plain.parameters(), lr=0.05)
    fused.weight.grad = data(0, 48, 16)
    plain.weight.grad = data(0, 48, 16)
    opt.step()
    reference.step()
    assert torch.equal(fused.weight, plain.weight)
    opt.close()
