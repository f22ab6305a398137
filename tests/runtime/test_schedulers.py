"""Learning rates: schedulers drive the param groups, and the owners use what stands there."""

from __future__ import annotations

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference import DDPReference, Recipe, assert_equal_params, assert_equal_ranks
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from freehold import AdamW, Group, LayerwiseOptimizer, Muon
from freehold.errors import ConsistencyError

# How a user writes it: no decay for norms and biases, an embedding at a learning rate of its own.
GROUPS = (
    Group("*norm.*", weight_decay=0.0),
    Group("*.bias", weight_decay=0.0),
    Group("embedding.weight", lr=1e-2, weight_decay=0.05),
)


def _optimizer(model: nn.Module) -> LayerwiseOptimizer:
    return LayerwiseOptimizer(
        model, matrix=Muon(lr=0.02), elementwise=AdamW(lr=3e-3, weight_decay=0.1), groups=GROUPS, bucket_numel=3000
    )


def _torch_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The same groups, by hand."""
    named = dict(model.named_parameters())
    no_decay = [p for n, p in named.items() if "norm." in n or n.endswith(".bias")]
    embedding = [named["embedding.weight"]]
    matrices = [p for n, p in named.items() if models.is_matrix(n, p)]
    taken = {id(p) for p in (*no_decay, *embedding, *matrices)}
    rest = [p for p in named.values() if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW(
            [
                {"params": no_decay, "weight_decay": 0.0},
                {"params": embedding, "lr": 1e-2, "weight_decay": 0.05},
                {"params": rest},
            ],
            lr=3e-3,
            weight_decay=0.1,
        ),
    ]


def _schedulers(kind: str, optimizers: list[torch.optim.Optimizer]) -> list[LRScheduler]:
    made: list[LRScheduler] = []
    for opt in optimizers:
        match kind:
            case "lambda":
                made.append(LambdaLR(opt, lambda step: 0.5**step))
            case "plateau":
                made.append(ReduceLROnPlateau(opt, factor=0.3, patience=1))
            case "sequential":
                parts = [LinearLR(opt, 0.1, total_iters=2), CosineAnnealingLR(opt, T_max=4)]
                made.append(SequentialLR(opt, parts, milestones=[2]))
            case "onecycle":
                peaks = [3 * group["lr"] for group in opt.param_groups]
                made.append(OneCycleLR(opt, max_lr=peaks, total_steps=8, cycle_momentum=False))
    return made


def _advance(schedulers: list[LRScheduler], step: int) -> None:
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step([3.0, 2.0, 2.0, 2.0, 2.0, 2.0][step])
        else:
            scheduler.step()


def _train(kind: str) -> list[list[float]]:
    model = models.make("gpt")
    reference = DDPReference(model, Recipe())
    reference.optimizers = _torch_optimizers(reference.model)
    opt = _optimizer(model)
    assert isinstance(opt, torch.optim.Optimizer)
    ours, theirs = _schedulers(kind, [opt]), _schedulers(kind, reference.optimizers)
    generator = torch.Generator().manual_seed(dist.get_rank())
    rates = []
    for step in range(6):
        inputs = models.batch("gpt", generator)
        models.loss_of(model, inputs).backward()
        reference.backward(inputs)
        opt.step()
        opt.zero_grad()
        reference.step()
        assert_equal_params(model, reference.model, f"{step=}")
        rates.append([group["lr"] for group in opt.param_groups])
        _advance(ours, step)
        _advance(theirs, step)
    opt.close()
    return rates


@pytest.mark.parametrize("kind", ["lambda", "onecycle", "plateau", "sequential"])
def test_a_schedule_over_groups_has_the_bits_of_torch(kind: str) -> None:
    ours, theirs = run_ranks(2, _train, kind)
    assert ours == theirs
    assert ours[0] != ours[5], "the schedule never moved"
    if kind == "lambda":
        for step, rates in enumerate(ours):
            assert rates == [base * 0.5**step for base in ours[0]]


class Planted(nn.Module):
    """A loss whose gradient is ``grad``, whatever the weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.matrix = nn.Parameter(torch.zeros(24, 16))
        self.vector = nn.Parameter(torch.zeros(16))
        self.grad = torch.randn(24, 16, generator=generator)

    def forward(self) -> torch.Tensor:
        return (self.matrix * self.grad).sum() + self.vector.sum()


def _moves(make_schedule: str) -> None:
    """With no memory of the past and no decay, a step is the learning rate times something that never changes."""
    model = Planted()
    opt = LayerwiseOptimizer(
        model,
        matrix=Muon(lr=0.02, momentum=0.0, nesterov=False, weight_decay=0.0),
        elementwise=AdamW(lr=1e-3, betas=(0.0, 0.0), weight_decay=0.0),
    )
    (scheduler,) = _schedulers(make_schedule, [opt])
    unit = None
    for step in range(6):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model().backward()
        opt.step()
        opt.zero_grad()
        matrix_lr, vector_lr = (group["lr"] for group in opt.param_groups)
        unit = -model.matrix.detach() / matrix_lr if unit is None else unit
        torch.testing.assert_close(-model.matrix.detach(), matrix_lr * unit, rtol=1e-5, atol=0)
        torch.testing.assert_close(-model.vector.detach(), torch.full((16,), vector_lr), rtol=1e-5, atol=0)
        _advance([scheduler], step)
    opt.close()


@pytest.mark.parametrize("kind", ["onecycle", "plateau"])
def test_the_effective_learning_rate_is_the_groups(kind: str) -> None:
    run_ranks(2, _moves, kind)


def test_onecycle_with_cycle_momentum_is_torchs_own_error() -> None:
    opt = _optimizer(models.make("gpt"))
    with pytest.raises(ValueError, match="must support momentum"):
        OneCycleLR(opt, max_lr=0.1, total_steps=8)
    opt.close()


def _edit(what: str) -> None:
    """Edits of the live groups take effect at the next step, whoever makes them."""
    model = Planted()
    opt = LayerwiseOptimizer(
        model,
        matrix=Muon(lr=0.02, momentum=0.0, nesterov=False, weight_decay=0.0),
        elementwise=AdamW(lr=1e-3, betas=(0.0, 0.0), weight_decay=0.0),
    )
    with torch.no_grad():
        model.vector.fill_(2.0)
    match what:
        case "float":
            opt.param_groups[1]["lr"] = 0.25
        case "tensor":
            opt.param_groups[1]["lr"] = torch.tensor(0.25)
        case "weight_decay":
            opt.param_groups[1]["lr"] = 0.25
            opt.param_groups[1]["weight_decay"] = 0.5
    model().backward()
    opt.step()
    opt.synchronize()
    expected = 2.0 * (1 - 0.25 * 0.5) - 0.25 if what == "weight_decay" else 1.75
    torch.testing.assert_close(model.vector.detach(), torch.full((16,), expected), rtol=1e-6, atol=0)
    opt.close()


@pytest.mark.parametrize("what", ["float", "tensor", "weight_decay"])
def test_edits_of_a_group_take_effect_at_the_next_step(what: str) -> None:
    run_ranks(2, _edit, what)


def _different_rates() -> tuple[str, bool]:
    model = models.make("mlp")
    opt = LayerwiseOptimizer(model, matrix=Muon(lr=0.02), elementwise=AdamW(lr=3e-3), bucket_numel=1500)
    before = [p.detach().clone() for p in model.parameters()]
    if dist.get_rank() == 1:
        opt.param_groups[0]["lr"] = 0.03
    models.loss_of(model, models.batch("mlp", torch.Generator())).backward()
    try:
        opt.step()
        message = "nothing was raised"
    except ConsistencyError as error:
        message = str(error)
    unchanged = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    opt.param_groups[0]["lr"] = 0.02
    opt.step()
    moved = not torch.equal(next(model.parameters()), before[0])
    opt.synchronize()
    assert_equal_ranks(model)
    opt.close()
    return message, unchanged and moved


def test_different_rates_on_ranks_are_refused_on_all_and_can_be_mended() -> None:
    for message, as_told in run_ranks(3, _different_rates):
        assert "ranks disagree" in message
        assert "0.03" in message
        assert "[1]" in message, "the message names the rank"
        assert as_told
