"""Training loops that go wrong: exceptions half-way, overflow, missing gradients, clipping by hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    PlainSGD,
    TorchPair,
    assert_ranks_agree,
    assert_same,
    data,
    error_of,
    everywhere,
    mean_over_ranks,
    reduced,
    snapshot,
    weights,
    wrap,
)
from ranks import run_ranks
from torch import Tensor, nn

from freehold import LayerwiseOptimizer
from freehold.rules.base import Span


def _toggled() -> None:
    rank = dist.get_rank()
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    reference = copy.deepcopy(model)
    opt, pair = wrap(model, bucket_numel=1, weight_decay=0.1), TorchPair(reference, weight_decay=0.1)
    for step in range(6):
        for each in (model, reference):
            each[1].requires_grad_(step % 3 != 1)
            each[0].bias.requires_grad_(step % 2 == 0)
        x = data(2 * step + rank, 4, 8)
        model(x).square().mean().backward()
        reference(x).square().mean().backward()
        mean = mean_over_ranks({n: p.grad for n, p in reference.named_parameters()})
        opt._log.clear()
        opt.step()
        opt.zero_grad()
        for name, p in reference.named_parameters():
            p.grad = mean[name]
        pair.step()
        pair.zero_grad()
        assert_same(weights(model), weights(reference), f"step {step}:")
    assert_ranks_agree(model)


def test_requires_grad_toggled_between_steps() -> None:
    run_ranks(2, _toggled)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(34)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: Tensor, breaks: str = "") -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if index == 5 and breaks == "forward":
                raise KeyError("mid-forward")
            if index == 5 and breaks == "backward":
                x.register_hook(_break)
        return x


def _break(grad: Tensor) -> None:
    raise KeyError("mid-backward")


def _broken(breaks: str, cleanup: str) -> None:
    """All ranks fail alike half-way, discard the window, and go on as if nothing had been."""
    rank = dist.get_rank()
    model, plain = Fragile(), Fragile()
    opt, off = wrap(model, bucket_numel=1), wrap(plain, bucket_numel=1, overlap=False)
    for step in range(3):
        x = data(2 * step + rank, 3, 8)
        with contextlib.suppress(KeyError):
            model(x, breaks).square().mean().backward()
            raise AssertionError("nothing broke")
        if cleanup == "opt":
            opt.zero_grad()
        elif cleanup == "model":
            model.zero_grad()
        elif cleanup == "zeros":
            opt.zero_grad(set_to_none=False)
        elif cleanup == "replace":
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        for each, optimizer in ((model, opt), (plain, off)):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights(model), weights(plain), f"step {step}:")
    assert_ranks_agree(model)


@pytest.mark.parametrize("cleanup", ["opt", "model", "zeros", "replace"])
@pytest.mark.parametrize("breaks", ["forward", "backward"])
def test_an_exception_half_way_and_a_fresh_start(breaks: str, cleanup: str) -> None:
    run_ranks(2, _broken, breaks, cleanup)


def _retried() -> None:
    """After a failure in backward the same batch again, with nothing discarded: the sum, as plain torch has it."""
    rank = dist.get_rank()
    model, plain = Fragile(), Fragile()
    opt = wrap(model, bucket_numel=1)
    x = data(rank, 3, 8)
    for each in (model, plain):
        with contextlib.suppress(KeyError):
            each(x, "backward").square().mean().backward()
            raise AssertionError("nothing broke")
        each(x).square().mean().backward()
    mean = mean_over_ranks({n: p.grad for n, p in plain.named_parameters()})
    for name, grad in reduced(opt).items():
        assert mean[name] is not None
        torch.testing.assert_close(grad, mean[name].flatten(), rtol=1e-5, atol=1e-8)
    opt.step()
    assert_ranks_agree(model)


def test_a_retry_after_a_broken_backward_adds_up_as_in_torch() -> None:
    run_ranks(2, _retried)


def _one_rank_breaks(when: str) -> None:
    """One rank's backward dies; it comes to step() with what it has. The others neither hang nor differ."""
    rank, model = dist.get_rank(), Fragile()
    opt = wrap(model, bucket_numel=1)
    x = data(rank, 3, 8)
    with contextlib.suppress(KeyError):
        model(x, when if rank == 1 else "").square().mean().backward()
    opt.step()
    opt.zero_grad()
    assert_ranks_agree(model)
    model(x).square().mean().backward()
    opt.step()
    assert_ranks_agree(model)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_one_rank_breaks_and_steps_with_what_it_has(when: str) -> None:
    run_ranks(2, _one_rank_breaks, when)


def _huge_lr() -> None:
    """Weights overflow; gradients are then no numbers, and all ranks say so together."""
    rank = dist.get_rank()
    torch.manual_seed(35)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    opt = wrap(model, lr=1e30, adam_lr=1e30)
    errors = []
    for step in range(4):
        model(data(2 * step + rank, 3, 8)).square().sum().backward()
        errors.append(error_of(opt.step))
        opt.zero_grad()
        assert_ranks_agree(model)
    seen = everywhere(errors)
    assert seen[0] == seen[1]
    assert errors[0] is None
    assert errors[-1] is not None
    assert errors[-1][0] == "NonFiniteGradientError"


def test_a_huge_learning_rate_ends_in_the_same_error_everywhere() -> None:
    run_ranks(2, _huge_lr)


def _large_gradients(dtype: torch.dtype, size: float) -> None:
    """Finite gradients whose squares are not."""
    model = nn.Linear(8, 8).to(dtype)
    opt = wrap(model)
    ((model.weight.sum() + model.bias.sum()) * size).backward()
    norm = opt.clip_grad_norm_(1.0)
    assert float(norm) == pytest.approx(size * 72**0.5, rel=1e-6)
    for _, _, grad in opt.reduced_grads():
        torch.testing.assert_close(grad, torch.full_like(grad, 72**-0.5), rtol=1e-5, atol=0)
    opt.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_ranks_agree(model)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (torch.float64, 1e60)])
def test_large_finite_gradients_are_finite(dtype: torch.dtype, size: float) -> None:
    run_ranks(2, _large_gradients, dtype, size)


def _steps_without_gradients() -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    opt = wrap(model, weight_decay=0.1)
    assert everywhere(float(opt.clip_grad_norm_(1.0))) == [0.0, 0.0]
    opt.step()
    model(data(rank, 3, 8)).square().sum().mul(float("nan")).backward()
    assert error_of(opt.step) is not None
    opt.zero_grad()
    before = snapshot(opt)
    for _ in range(2):  # nothing is left of the NaNs, and nothing to do
        assert everywhere(float(opt.clip_grad_norm_(1.0))) == [0.0, 0.0]
        assert not any(g.any() for g in reduced(opt).values())
        opt.step()
    assert_same(snapshot(opt), before)


def test_a_step_without_any_gradient_does_nothing() -> None:
    run_ranks(2, _steps_without_gradients)


def _torch_clip() -> None:
    """A habit from other optimizers: it meets placeholders, and must not lose a step without a word."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for function in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: [p.grad.mul_(0.5) for p in model.parameters()],
        lambda: [p.grad.__setitem__(..., 0.5) for p in model.parameters()],
        lambda: [p.grad.data.mul_(0.5) for p in model.parameters()],
    ):
        opt = wrap(model)
        before = weights(model)
        model(data(rank, 3, 8)).square().sum().backward()
        errors = everywhere(error_of(function) or error_of(opt.step))
        assert errors[0] == errors[1]
        changed = any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert errors[0] is not None or changed, "the gradients were dropped silently"
        opt.close()


def test_clipping_by_hand_is_no_silent_loss() -> None:
    run_ranks(2, _torch_clip)


@dataclass(frozen=True, slots=True)
class _Failing(PlainSGD):
    """Raises where a gradient is larger than 10."""

    @torch.no_grad()
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        if bool((span.grad > 10).any()):
            raise ZeroDivisionError("a rule of the user's")
        PlainSGD.update(self, span, options)


def _failing_rule() -> None:
    """Only the owner of one norm runs into the error; the others get its weights, and learn of it at the next call."""
    model = nn.Sequential(*[nn.LayerNorm(64) for _ in range(6)])
    opt = LayerwiseOptimizer(model, matrix=None, elementwise=_Failing(lr=0.1), bucket_numel=1)
    slots = [slot for b in opt._buckets for slot in b.owned if slot.name == "5.weight"]
    assert sum(everywhere(len(slots))) == 1  # one rank owns it alone
    for p in model.parameters():
        p.grad = torch.full_like(p, 11.0 if p is model[5].weight else 1.0)
    error = error_of(opt.step)
    assert (error is not None) == bool(slots)
    assert error is None or error == ("ZeroDivisionError", "a rule of the user's")
    assert_ranks_agree(model)
    errors = everywhere(error_of(opt.step))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "LifecycleError"
    assert "a rule of the user's" in errors[0][1]
    opt.close()


def test_a_rule_that_raises_on_its_owner_stops_all_ranks_without_a_hang() -> None:
    run_ranks(2, _failing_rule)
