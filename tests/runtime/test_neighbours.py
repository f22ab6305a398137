"""PyTorch's own tools beside the optimizer: each works, or says what to call instead.

Elsewhere: compiled models, averages and deepcopies (test_lifecycle), reads of all kinds (test_stale_reads), schedulers
(test_schedulers), modules used twice and tied weights (test_cases_hooks), frozen and thawed params (test_bad_use,
test_broken_loops).
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
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
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import freehold


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(40)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 8)).to(dtype)


# ---- activation checkpointing, autocast ----


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(41)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, how: str = "plain") -> Tensor:
        for block in self.blocks:
            x = x + (block(x) if how == "plain" else checkpoint(block, x, use_reentrant=how == "reentrant"))
        return x


def _grads_are_those_of_torch(model: nn.Module, plain: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> None:
    """Averaged gradients of three windows, the second of two backwards, against plain torch on every rank."""
    opt = wrap(model)
    for step, num_micro in enumerate((1, 2, 1)):
        for micro in range(num_micro):
            seed = 10 * step + 2 * micro + dist.get_rank()
            if micro < num_micro - 1:
                with opt.no_sync():
                    loss(model, seed).backward()
            else:
                loss(model, seed).backward()
            loss(plain, seed).backward()
        mean = mean_over_ranks({name: p.grad for name, p in plain.named_parameters()})
        found = reduced(opt)
        assert_same({n: found[n] for n in mean}, {n: g.flatten() for n, g in mean.items() if g is not None}, f"{step=}")
        opt.step()
        opt.zero_grad()
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
    assert_ranks_agree(model)


def _checkpointed(how: str) -> None:
    model = Blocks()

    def loss(each: nn.Module, seed: int) -> Tensor:
        x = data(seed, 3, 8).requires_grad_()  # reentrant checkpointing needs an input with a gradient
        return each(x, how if each is model else "plain").square().mean()

    _grads_are_those_of_torch(model, copy.deepcopy(model), loss)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_changes_no_bit(how: str) -> None:
    run_ranks(2, _checkpointed, how)


def _autocast(dtype: torch.dtype) -> None:
    def loss(each: nn.Module, seed: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return each(data(seed, 3, 8)).float().square().mean()

    model = _net()
    _grads_are_those_of_torch(model, copy.deepcopy(model), loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    run_ranks(2, _autocast, dtype)


# ---- GradScaler ----


def _scaled(dtype: torch.dtype, unscale_first: bool) -> None:
    """A power of two changes no bit: scaled and unscaled training are the same."""
    model, plain = _net(dtype), _net(dtype)
    opt, off = wrap(model), wrap(plain)
    scaler = freehold.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(5):
        x = data(2 * step + dist.get_rank(), 3, 8, dtype=dtype)
        scaler.scale(model(x).square().mean()).backward()
        plain(x).square().mean().backward()
        norms = []
        if unscale_first:
            scaler.unscale_(opt)
            norms = [float(o.clip_grad_norm_(0.1)) for o in (opt, off)]
            assert norms[0] == norms[1]
        scaler.step(opt)
        scaler.update()
        off.step()
        opt.zero_grad()
        off.zero_grad()
        assert_same(weights(model), weights(plain), f"{step=}")
    assert everywhere(scaler.get_scale()) == [256.0, 256.0]  # it grew twice
    assert_ranks_agree(model)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_unscales_where_the_gradients_are(dtype: torch.dtype, unscale_first: bool) -> None:
    run_ranks(2, _scaled, dtype, unscale_first)


def _overflow(unscale_first: bool) -> None:
    """Rank 1 alone meets inf, in a gradient that rank 0 owns; then a finite step."""
    rank, model, clean = dist.get_rank(), _net(), _net()
    opt, never = wrap(model), wrap(clean)
    name = next(slot.name for b in opt._buckets for slot in b.bucket.slots if slot.rank == 0 and "weight" in slot.name)
    scaler = freehold.GradScaler("cpu", init_scale=64.0)
    before = snapshot(opt)
    with opt.no_sync():
        scaler.scale(model(data(rank, 3, 8)).square().mean()).backward()
    if rank == 1:
        model.get_parameter(name).grad = torch.full_like(model.get_parameter(name), float("inf"))
    if unscale_first:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    assert everywhere(scaler.get_scale()) == [32.0, 32.0]
    assert_same(snapshot(opt), before, "a skipped step:")
    opt.zero_grad()
    for each, optimizer in ((model, opt), (clean, never)):
        loss = each(data(2 + rank, 3, 8)).square().mean()
        if each is model:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    assert_same(snapshot(opt), snapshot(never), "the step after:")
    assert opt.num_skipped_steps == 0  # those are counted by the scaler
    assert_ranks_agree(model)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_b06_with_a_scaler_all_ranks_skip_an_overflow_and_nothing_is_left_of_it(unscale_first: bool) -> None:
    run_ranks(2, _overflow, unscale_first)


def test_the_scaler_serves_other_optimizers_as_that_of_torch_does() -> None:
    results = []
    for kind in (freehold.GradScaler, torch.amp.GradScaler):
        model = _net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler: Any = kind("cpu", init_scale=64.0)
        for seed in range(3):
            scaler.scale(model(data(seed, 3, 8)).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        results.append(weights(model))
    assert_same(results[0], results[1])


# ---- clipping utilities called on the model ----


def _clip_by_mistake() -> None:
    model = _net()
    opt = wrap(model)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=False),
        lambda: model[0].weight.grad.mul_(0.5),
        lambda: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
        lambda: model[0].weight.grad.data.mul_(0.5),
    )
    for step, call in enumerate(calls):
        model(data(2 * step + dist.get_rank(), 3, 8)).square().sum().backward()
        errors = everywhere(error_of(call))
        assert errors[0] == errors[1]
        assert errors[0] is not None, f"{step=}"
        if "data" not in call.__code__.co_names:
            assert errors[0][0] == "LifecycleError", errors[0]
            assert "opt.clip_grad_norm_" in errors[0][1]
        opt.clip_grad_norm_(1.0)  # what it should have been: nothing is lost
        opt.step()
        opt.zero_grad()
    assert_ranks_agree(model)


def test_clipping_utilities_say_what_to_call() -> None:
    run_ranks(2, _clip_by_mistake)


def test_the_placeholder_reads_as_nan_and_is_no_subclass_in_results() -> None:
    model = _net()
    opt = wrap(model)
    model(data(0, 3, 8)).sum().backward()
    grad = model[0].weight.grad
    assert grad is not None
    assert grad.shape == model[0].weight.shape
    assert bool(grad.isnan().all())
    assert type(grad.norm()) is Tensor
    assert type(grad + 1) is Tensor
    assert "nan" in repr(grad)
    opt.close()


# ---- worker processes that fork ----


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return data(index, 8)


def _forking_loader() -> None:
    config: Any = vars(multiprocessing.current_process())["_config"]
    config["daemon"] = False  # else this rank, a worker of the test suite, may have no children
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork in a process with threads
        losses = []
        for num_workers in (0, 2):
            model = _net()
            opt = wrap(model)
            for _ in range(2):  # the second round forks while weights of the first are on their way
                options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
                for batch in DataLoader(Numbers(), batch_size=3, num_workers=num_workers, **options):
                    loss = model(batch + dist.get_rank()).square().mean()
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
            losses.append(weights(model))
            opt.close()
    config["daemon"] = True
    assert_same(losses[1], losses[0])


def test_dataloader_workers_that_fork() -> None:
    run_ranks(2, _forking_loader)


def _fork_reads_weights() -> None:
    """A fork cannot wait for weights that its parent was still receiving."""
    model = _net()
    opt = wrap(model)
    model(data(dist.get_rank(), 3, 8)).sum().backward()
    opt.step()
    assert opt._gatherer.busy
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        error = error_of(lambda: model(data(0, 1, 8)))
        os.write(writing, repr(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"LifecycleError" in (said := os.read(reading, 1000))
    assert b"forked" in said
    os.close(reading)
    os.close(writing)
    model(data(0, 1, 8)).sum().backward()
    opt.step()
    assert_ranks_agree(model)


def test_a_fork_is_told_that_it_cannot_wait() -> None:
    run_ranks(2, _fork_reads_weights)
