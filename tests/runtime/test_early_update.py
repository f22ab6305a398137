"""Updates during backward: the same bits as updates in ``step``, and a clear refusal of what they rule out."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from cases import assert_ranks_agree, data, everywhere
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


class Chain(nn.Module):
    """Layers one after the other; ``fail_at`` raises in backward before that layer's gradient."""

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, fail_at: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == fail_at:
                x.register_hook(_raise)
        return x.square()


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError("half-way")


def _chain(**options: Any) -> tuple[Chain, LayerwiseOptimizer]:
    model = Chain()
    rules = {"matrix": Recipe().rules()["matrix"], "elementwise": None}
    return model, LayerwiseOptimizer(model, **rules, **{"bucket_numel": 1, **EARLY, **options})


def _between_backward_and_step() -> None:
    model, opt = _chain()
    x = data(dist.get_rank(), 2, 8)
    model(x).sum().backward()
    assert any(everywhere(bool(opt._early.done)))
    for call in (opt.state_dict, opt.verify):
        with pytest.raises(LifecycleError, match=r"call step\(\) first"):
            call()
    opt.step()
    opt.zero_grad()
    opt.verify()
    model(x).sum().backward()
    model.zero_grad()  # torch's own, which nothing can refuse
    model(x).sum().backward()
    with pytest.raises(LifecycleError, match="gradients were discarded after weights had been updated"):
        opt.step()


def test_what_lies_between_backward_and_step_is_refused_on_every_rank() -> None:
    run_ranks(2, _between_backward_and_step)


def _closed_early() -> None:
    model, opt = _chain()
    before = [p.detach().clone() for p in model.parameters()]
    model(data(dist.get_rank(), 2, 8)).sum().backward()
    assert any(everywhere(bool(opt._early.done)))
    opt.close()
    assert_ranks_agree(model)
    assert any(not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))


def test_closing_after_a_backward_leaves_equal_weights() -> None:
    run_ranks(2, _closed_early)


def test_a_backward_that_died_and_is_discarded_updates_nothing() -> None:
    model, opt = _chain()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ArithmeticError, match="half-way"):
        model(data(0, 2, 8), fail_at=6).sum().backward()
    opt.zero_grad()
    assert all(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))
    model(data(0, 2, 8)).sum().backward()
    opt.step()


def test_a_weight_that_backward_reads_again_is_an_error_and_no_wrong_gradient() -> None:
    model, opt = _chain()
    late = model.layers[-1].weight

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(nn.functional.linear(x, late.detach()))

    x = data(0, 2, 8).requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward(x).sum().backward()
    opt.close()


def test_one_rank_updates_early_too() -> None:
    model, opt = _chain()
    model(data(0, 2, 8)).sum().backward()
    assert len(opt._early.done) == len(opt.layout.buckets) - 2 > 0  # all but those that may still be under way
    opt.step()


def test_a_load_clears_what_a_rule_refused() -> None:
    model, opt = _chain()
    saved = opt.state_dict()
    opt.param_groups[0]["lr"] = -1.0
    model(data(0, 2, 8)).sum().backward()
    with pytest.raises(RuleError, match="earning rate"):
        opt.step()
    opt.param_groups[0]["lr"] = 0.1
    with pytest.raises(LifecycleError, match="start again from a checkpoint"):
        opt.step()
    opt.load_state_dict(saved)
    model(data(0, 2, 8)).sum().backward()
    opt.step()
