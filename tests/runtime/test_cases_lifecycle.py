"""Reported cases about the life of an optimizer: hooks, references, copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from cases import assert_ranks_agree, assert_same, data, error_of, launches, weights, wrap
from ranks import run_ranks
from torch import nn

from freehold import AdamW, Group, LayerwiseOptimizer, Muon
from freehold.errors import LifecycleError, PlanTypeError, RoutingError


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


def _wrap_close_wrap() -> None:
    model, reference = _net(), _net()
    ref_opt = wrap(reference, matrix=Muon(momentum=0.0), elementwise=AdamW(betas=(0.0, 0.0)))
    for round_ in range(3):
        opt = wrap(model, matrix=Muon(momentum=0.0), elementwise=AdamW(betas=(0.0, 0.0)))
        assert _hooks_on(model) == _hooks_on(reference)  # none stacked
        _train(model, opt, 900 + 10 * round_)
        _train(reference, ref_opt, 900 + 10 * round_)
        opt.close()
        opt.close()  # again does nothing
        assert _hooks_on(model) == 0
        assert all(p.grad is None for p in model.parameters())
    # These rules remember nothing of earlier steps, so starting anew changes nothing.
    assert_same(weights(model), weights(reference))
    assert_ranks_agree(model)


def test_b37_wrap_step_close_and_wrap_again() -> None:
    run_ranks(2, _wrap_close_wrap)


def _nothing_left(closing: bool) -> None:
    model = _net()
    opt = wrap(model)
    torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)  # schedulers patch opt.step, which makes a cycle
    _train(model, opt, 910, steps=2)
    inside = [opt, opt._reducer, opt._gatherer, opt._comm, opt._buckets[0], opt._params[0], opt._guard]
    dead = [weakref.ref(thing) for thing in inside]
    dead += [weakref.ref(t) for b in opt._buckets for t in (b.grads.flat, *b.memory.state.values())]
    if closing:
        opt.close()
    else:
        opt.synchronize()
    del opt, inside
    gc.collect()
    alive = [ref() for ref in dead if ref() is not None]
    assert not alive, [type(thing) for thing in alive]
    before = weights(model)
    model(data(1, 2, 8)).sum().backward()  # and the model is a plain one again
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert_same(weights(model), before)


@pytest.mark.parametrize("closing", [True, False])
def test_b37_nothing_keeps_a_closed_or_dropped_optimizer_alive(closing: bool) -> None:
    run_ranks(2, _nothing_left, closing)


def _double() -> None:
    model = _net()
    opt = wrap(model)
    hooks = _hooks_on(model)
    error = error_of(lambda: wrap(model))
    assert error is not None
    assert error[0] == "LifecycleError"
    assert "close()" in error[1]
    assert _hooks_on(model) == hooks
    assert issubclass(LifecycleError, RuntimeError)
    _train(model, opt, 920)  # the first still works
    assert_ranks_agree(model)


def test_b37_a_second_optimizer_on_the_same_params_is_refused() -> None:
    run_ranks(2, _double)


def _copies(how: str) -> None:
    """Taken right after a step, while gathers are in flight; the copy is current and trains on its own."""
    rank = dist.get_rank()
    model, off = _net(), _net()
    opt, opt_off = wrap(model, bucket_numel=1), wrap(off, bucket_numel=1, overlap=False)
    _train(off, opt_off, 930, steps=2)
    _train(model, opt, 930, steps=2)
    twin = _copied(model, how)
    assert_same(weights(twin), weights(off))
    opt._log.clear()
    if rank == 0:  # one rank alone: anything collective would hang or be logged
        for _ in range(2):
            twin(data(5, 3, 8)).square().sum().backward()
        plain = _net()
        plain.load_state_dict(off.state_dict())
        for _ in range(2):
            plain(data(5, 3, 8)).square().sum().backward()
        for p, q in zip(twin.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, q.grad)
    assert not launches(opt)
    assert all(p.grad is None for p in model.parameters())
    twin[0].weight.data.fill_(7.0)
    assert_same(weights(model), weights(off))  # no memory is shared
    _train(model, opt, 940)
    _train(off, opt_off, 940)
    assert_same(weights(model), weights(off))
    if how != "state_dict":
        second = wrap(twin)  # the copy can be wrapped itself
        _train(twin, second, 950)
        assert_ranks_agree(twin)


def _copied(model: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model if how == "save" else model.state_dict(), buffer)
    buffer.seek(0)
    if how == "save":
        return torch.load(buffer, weights_only=False)
    twin = _net(seed=1)
    twin.load_state_dict(torch.load(buffer))
    return twin


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "state_dict"])
def test_b37_a_copy_of_the_model_is_current_and_starts_no_collective(how: str) -> None:
    run_ranks(2, _copies, how)


def test_b37_the_optimizer_itself_cannot_be_copied_or_pickled() -> None:
    opt = wrap(_net())
    for function in (lambda: copy.deepcopy(opt), lambda: copy.copy(opt), lambda: pickle.dumps(opt)):
        with pytest.raises(TypeError, match="LayerwiseOptimizer cannot be"):
            function()
    opt.close()


def test_b37_subset_foreign_and_duplicate_params() -> None:
    """Named params are the explicit way to manage a subset: what is left out stays untouched."""
    model = _net()
    named = list(model.named_parameters())
    subset = [(n, p) for n, p in named if n.startswith("0.")]
    before = weights(model)
    opt = wrap(subset)
    assert [len(g["params"]) for g in opt.param_groups] == [1, 1]
    model(data(1, 4, 8)).square().mean().backward()
    opt.step()
    changed = {n for n, t in weights(model).items() if not torch.equal(t, before[n])}
    assert changed == {"0.weight", "0.bias"}
    assert model[2].weight.grad is not None
    assert torch.isfinite(model[2].weight.grad).all()  # not ours, so no placeholder
    opt.close()
    with pytest.raises(RoutingError, match=r"duplicate params.*'0\.weight' given 2 times"):
        wrap([*named, named[0]])
    with pytest.raises(RoutingError, match=r"one Parameter given as '0\.weight' and 'other'"):
        wrap([*named, ("other", named[0][1])])
    with pytest.raises(PlanTypeError, match=r"'x' must be an nn\.Parameter, got Tensor"):
        wrap([*named, ("x", torch.zeros(3, 3))])  # a foreign tensor
    with pytest.raises(RoutingError, match="takes no param"):
        wrap(model, groups=[Group("decoder.*", lr=0.1)])
    assert _hooks_on(model) == 0
    wrap(model).close()
