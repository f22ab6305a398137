"""Updates during backward: the same bits as updates in ``step``, and a clear refusal of what they rule out."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from cases import data
from ranks import run_ranks
from reference import DDPReference, Recipe, assert_equal_params
from torch import nn

from freehold import LayerwiseOptimizer
from freehold.errors import LifecycleError, PlanError, RuleError

EARLY = {"early_update": True, "on_nonfinite": "ignore"}


def _make(model: nn.Module, recipe: Recipe | None = None, **options: Any) -> LayerwiseOptimizer:
    rules = (recipe or Recipe()).rules()
    return LayerwiseOptimizer(model, **rules, **{"bucket_numel": 500, **EARLY, **options})


def _bits(name: str, grad_memory: str) -> int:
    """Six steps beside DDP; returns how many buckets were updated inside backward."""
    recipe = Recipe(weight_decay=0.1)
    model = models.make(name)
    reference = DDPReference(model, recipe)
    opt = _make(model, recipe, grad_memory=grad_memory)
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_early = 0
    for step in range(6):
        inputs = models.batch(name, generator)
        models.loss_of(model, inputs).backward()
        reference.backward(inputs, sync=True)
        num_early += len(opt._early.done)
        opt.step()
        opt.zero_grad()
        reference.step()
        assert_equal_params(model, reference.model, f"{step=}")
    assert opt._early.done == set()
    opt.close()
    return num_early


@pytest.mark.parametrize("grad_memory", ["full", "sharded"])
@pytest.mark.parametrize("name", ["gpt", "gpt_tied"])
def test_bits_are_those_of_ddp(name: str, grad_memory: str) -> None:
    assert sum(run_ranks(2, _bits, name, grad_memory)) > 0, "nothing was updated inside backward"


class Two(nn.Module):
    """Two layers, either of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x.square()


def _partly_used() -> None:
    early, late = Two(), Two()
    rules = {"matrix": Recipe().rules()["matrix"], "elementwise": None}
    first = LayerwiseOptimizer(early, **rules, bucket_numel=1, **EARLY)
    second = LayerwiseOptimizer(late, **rules, bucket_numel=1)
    rank = dist.get_rank()
    for step in range(4):
        used = ((0, 1, 2, 5), (1, 3, 5))[rank] if step % 2 else (0, 1, 2, 3, 4, 5)
        for model, opt in ((early, first), (late, second)):
            model(data(10 * step + rank, 2, 8), used).sum().backward()
            opt.step()
            opt.zero_grad()
            opt.synchronize()
        for (name, p), q in zip(early.named_parameters(), late.parameters(), strict=True):
            assert torch.equal(p, q), (step, name)


def test_params_that_only_another_rank_used_are_updated_in_step() -> None:
    run_ranks(2, _partly_used)


def _refusals() -> None:
    model = models.make("mlp")
    opt = _make(model)
    inputs = models.batch("mlp", torch.Generator().manual_seed(dist.get_rank()))
    models.loss_of(model, inputs).backward()
    with pytest.raises(LifecycleError, match="cannot be clipped with early_update=True"):
        opt.clip_grad_norm_(1.0)
    if opt._early.done:
        with pytest.raises(LifecycleError, match=r"call step\(\) first"):
            opt.zero_grad()
    opt.step()
    opt.zero_grad()
    for _ in range(1 + dist.get_rank()):  # rank 1 runs a second synchronising backward
        models.loss_of(model, inputs).backward()
    with pytest.raises(LifecycleError, match=r"one synchronising backward; by rank there were \[1, 2\]"):
        opt.step()


def test_what_it_rules_out_is_refused_on_every_rank() -> None:
    run_ranks(2, _refusals)


def _bad_option() -> None:
    model = models.make("mlp")
    opt = _make(model)
    inputs = models.batch("mlp", torch.Generator().manual_seed(dist.get_rank()))
    for group in opt.param_groups:
        group["lr"] = -1.0
    models.loss_of(model, inputs).backward()
    with pytest.raises((RuleError, LifecycleError), match=r"earning rate"):
        opt.step()


def test_an_option_that_a_rule_refuses_is_told_by_step_on_every_rank() -> None:
    run_ranks(2, _bad_option)


def test_it_needs_gradients_to_be_taken_as_they_come() -> None:
    with pytest.raises(PlanError, match="pass on_nonfinite='ignore' as well"):
        _make(models.make("mlp"), on_nonfinite="raise")


def test_ignore_lets_a_nan_through() -> None:
    model = nn.Linear(8, 8, bias=False)
    opt = LayerwiseOptimizer(model, matrix=Recipe().rules()["matrix"], elementwise=None, on_nonfinite="ignore")
    (model(torch.ones(1, 8)).sum() * float("nan")).backward()
    opt.step()
    assert model.weight.isnan().all()
