"""Making, closing, dropping, copying and saving: nothing stays behind and nothing is shared by accident."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import TorchPair, assert_ranks_agree, assert_same, data, error_of, everywhere, weights, wrap
from ranks import run_ranks
from torch import Tensor, nn

from freehold import AdamW, LayerwiseOptimizer, Muon


def _net(seed: int = 20, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))


def _train(model: nn.Module, opt: LayerwiseOptimizer, seed: int, steps: int = 1, width: int = 8) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        model(data(seed + 2 * step + rank, 4, width)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def _hooks_on(model: nn.Module) -> int:
    modules = [
        len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()
    ]
    params = [len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return sum(modules) + sum(params)


def _error_leaves_nothing() -> None:
    model = _net()
    errors = everywhere(error_of(lambda: wrap(model, policy="threshold" if dist.get_rank() else "no such policy")))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert _hooks_on(model) == 0
    opt = wrap(model)
    _train(model, opt, 960)
    assert_ranks_agree(model)
    opt.close()


def test_an_error_while_wrapping_leaves_no_hooks_and_the_model_can_be_wrapped() -> None:
    run_ranks(2, _error_leaves_nothing)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _gan_run(gan: Gan, make: Any) -> list[float]:
    """Alternate steps, with the generator's loss going back through the critic, then both after one backward."""
    rank = dist.get_rank()
    opt_g, opt_c = make(gan.generator), make(gan.critic)
    losses = []
    for step in range(4):
        z, real = data(1000 + 2 * step + rank, 5, 4), data(1100 + 2 * step + rank, 5, 8)
        fake = gan.generator(z)
        loss = gan.critic(fake.detach()).mean() - gan.critic(real).mean()
        loss.backward()
        opt_c.step()
        opt_c.zero_grad()
        loss_g = -gan.critic(gan.generator(z)).mean()
        loss_g.backward()  # also leaves gradients in the critic, which are thrown away
        opt_g.step()
        opt_g.zero_grad()
        opt_c.zero_grad()
        (gan.critic(gan.generator(z)) ** 2).mean().backward()
        if step % 2:
            opt_g.step()
            opt_c.step()
        else:
            opt_c.step()
            opt_g.step()
        opt_g.zero_grad()
        opt_c.zero_grad()
        losses.append(float(loss_g.detach()))
    return losses


class _Ddp:
    """The reference: DDP-style averaging by hand and torch's optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self.pair, self.model = TorchPair(model), model

    def step(self) -> None:
        for p in self.model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.pair.step()

    def zero_grad(self) -> None:
        self.pair.zero_grad()


def _gan() -> None:
    ours, reference = Gan(), Gan()
    assert _gan_run(ours, wrap) == _gan_run(reference, _Ddp)
    assert_same(weights(ours), weights(reference))
    assert_ranks_agree(ours)


def test_two_optimizers_of_one_group_train_alternately_and_interleaved() -> None:
    run_ranks(2, _gan)


def _dropped(reading: bool) -> None:
    """The optimizer goes away while gathers are in flight; nobody closed it."""
    model, reference = _net(), _net()
    ref_opt = wrap(reference, bucket_numel=1, overlap=False)
    for round_ in range(3):
        opt = wrap(model, bucket_numel=1)
        _train(model, opt, 970 + 10 * round_)
        if reading:
            model(data(1, 1, 8))
        del opt
        gc.collect()
        _train(reference, ref_opt, 970 + 10 * round_)
        ref_opt.close()
        ref_opt = wrap(reference, bucket_numel=1, overlap=False)
        assert_same(weights(model), weights(reference), f"round {round_}:")
    assert_ranks_agree(model)
    modes = torch.overrides._get_current_function_mode_stack()
    assert len(modes) <= 1, modes


@pytest.mark.parametrize("reading", [True, False])
def test_an_optimizer_dropped_without_close_can_be_replaced(reading: bool) -> None:
    run_ranks(2, _dropped, reading)


def _destroyed_after_close() -> None:
    modes = torch.overrides._get_current_function_mode_stack()
    model = _net()
    opt = wrap(model, bucket_numel=1)
    _train(model, opt, 980, steps=2)
    model(data(3, 2, 8)).sum().backward()  # reductions in flight
    opt.close()
    before = weights(model)
    assert_ranks_agree(model)
    assert torch.overrides._get_current_function_mode_stack() == modes
    dist.barrier()
    dist.destroy_process_group()
    try:
        model(data(3, 2, 8)).sum().backward()
        assert_same(weights(model), before)
        alone = wrap(model)  # a group of one
        alone.step()
        alone.close()
    finally:  # the harness destroys a group once more
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def test_the_group_can_be_destroyed_after_close() -> None:
    run_ranks(2, _destroyed_after_close)


def _in_own_filters(when: str) -> None:
    with warnings.catch_warnings():
        _compiled(when)


def _compiled(when: str) -> None:
    warnings.simplefilter("ignore", UserWarning)  # Dynamo's own, on p.grad of what it cuts its graphs at
    torch._dynamo.reset()
    model, reference = _net(), _net()
    ref_opt = wrap(reference, bucket_numel=1, overlap=False)
    if when == "before":
        forward = torch.compile(model, backend="eager")
        opt = wrap(forward, bucket_numel=1)
    elif when == "before, inner given":
        forward = torch.compile(model, backend="eager")
        opt = wrap(model, bucket_numel=1)
    elif when == "in place":
        model.compile(backend="eager")
        forward, opt = model, wrap(model, bucket_numel=1)
    elif when == "in place after":
        opt = wrap(model, bucket_numel=1)
        model.compile(backend="eager")
        forward = model
    else:
        opt = wrap(model, bucket_numel=1)
        forward = torch.compile(model, backend="eager")
    for step in range(4):
        _train(forward, opt, 1200 + 10 * step)
        _train(reference, ref_opt, 1200 + 10 * step)
        x = data(3, 4, 8)
        assert torch.equal(forward(x), reference(x)), step
    assert_same(weights(model), weights(reference), when)
    assert_ranks_agree(model)


@pytest.mark.parametrize("when", ["before", "before, inner given", "in place", "in place after", "after"])
def test_compiled_models_train_as_uncompiled_ones(when: str) -> None:
    run_ranks(2, _in_own_filters, when)


def _averaged() -> None:
    rank = dist.get_rank()
    model, reference = _net(), _net()
    opt, ref_opt = wrap(model, bucket_numel=1), wrap(reference, bucket_numel=1, overlap=False)
    swa = torch.optim.swa_utils
    emas = [
        [swa.AveragedModel(m), swa.AveragedModel(m, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))]
        for m in (model, reference)
    ]
    for step in range(3):
        for each, optimizer, averages in ((model, opt, emas[0]), (reference, ref_opt, emas[1])):
            _train(each, optimizer, 1300 + 10 * step)
            averages[step % 2].update_parameters(each)
            averages[1 - step % 2].update_parameters(each)
        x = data(rank, 3, 8)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(x), reference(x))
        model.train()
    for ours, theirs in zip(*emas, strict=True):
        assert_same(weights(ours), weights(theirs))


def test_averages_and_evaluation_right_after_a_step_read_current_weights() -> None:
    run_ranks(2, _averaged)


def _eval_first() -> None:
    rank = dist.get_rank()
    model, reference = _net(), _net()
    opt, ref_opt = wrap(model, bucket_numel=1), wrap(reference, bucket_numel=1, overlap=False)
    for each, optimizer in ((model, opt), (reference, ref_opt)):
        _train(each, optimizer, 1400)
    x = data(rank, 3, 8)
    outputs = []
    for each in (model, reference):
        each.eval()
        with torch.inference_mode():
            outputs.append(each(x).clone())
    assert torch.equal(*outputs)
    _train(model, opt, 1410)
    _train(reference, ref_opt, 1410)
    assert_same(weights(model), weights(reference))


def test_an_inference_forward_right_after_a_step_reads_current_weights() -> None:
    run_ranks(2, _eval_first)


class Rotating(nn.Module):
    """Has buffers: one is changed by forward, one is a bool mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.mask


def _start_from_rank_0() -> None:
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    model = Rotating()
    model.norm.running_mean.fill_(float(rank + 1))
    model.mask[0] = rank == 0
    expected = everywhere({n: t.clone() for n, t in model.state_dict().items()})[0]
    opt = wrap(model)
    assert_same(dict(model.state_dict()), expected)
    _train(model, opt, 1500, width=4)
    assert_ranks_agree(model)


def test_all_ranks_start_from_the_weights_and_buffers_of_group_rank_0() -> None:
    run_ranks(2, _start_from_rank_0)


def _holders_of_the_group() -> list[str]:
    gc.collect()
    gc.disable()
    try:
        group = dist.group.WORLD
        before = {id(holder) for holder in gc.get_referrers(group)}
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        opt = LayerwiseOptimizer(model, matrix=Muon(), elementwise=AdamW())
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.close()
        del opt, model
        found = [type(holder).__name__ for holder in gc.get_referrers(group) if id(holder) not in before]
    finally:
        gc.enable()
    return [name for name in found if name not in ("tuple", "list", "dict")]


def test_a_closed_optimizer_lets_go_of_the_process_group() -> None:
    """A group that outlives destroy_process_group ends with the interpreter, while its threads still run: an abort."""
    for holders in run_ranks(2, _holders_of_the_group):
        assert holders == []
