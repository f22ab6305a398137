"""Misuse of a made optimizer: a clear error on all ranks, whichever of them did it, and training can go on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import assert_ranks_agree, assert_same, data, error_of, everywhere, snapshot, weights, wrap
from ranks import run_ranks
from torch import nn

from freehold import AdamW, LayerwiseOptimizer, Muon
from freehold.errors import LifecycleError, RuleError


def _net() -> nn.Sequential:
    torch.manual_seed(22)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def _sparse_gradient(sparse_ranks: tuple[int, ...]) -> None:
    class Model(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.table = nn.Embedding(16, 8, sparse=sparse)
            self.linear = nn.Linear(8, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.linear(self.table(tokens))

    rank = dist.get_rank()
    model = Model(rank in sparse_ranks)
    opt = wrap(model, bucket_numel=1)
    before = weights(model)
    error = error_of(lambda: model(torch.tensor([1, 2])).sum().backward())
    if rank in sparse_ranks:
        assert error is not None
        assert error[0] == "UnsupportedError"
        assert "'table.weight'" in error[1]
        assert "sparse=False" in error[1]
    else:
        assert error is None
    opt.zero_grad()
    assert_same(weights(model), before)
    model.table.sparse = False
    model(torch.tensor([1, 2])).sum().backward()
    opt.step()
    assert_ranks_agree(model)


@pytest.mark.parametrize("sparse_ranks", [(1,), (0, 1)])
def test_sparse_gradients_are_refused(sparse_ranks: tuple[int, ...]) -> None:
    run_ranks(2, _sparse_gradient, sparse_ranks)


def _grad_scaler(unscale_first: bool, in_float16: bool) -> None:
    model = _net().to(torch.float16 if in_float16 else torch.float32)
    opt = wrap(model)
    before = snapshot(opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(data(dist.get_rank(), 3, 8, dtype=model[0].weight.dtype)).sum()).backward()

    def use() -> None:
        if unscale_first:
            scaler.unscale_(opt)
        scaler.step(opt)

    errors = everywhere(error_of(use))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    if unscale_first and in_float16:  # torch's own refusal, before it looks at any gradient
        assert errors[0][0] == "ValueError"
    else:
        assert errors[0][0] == ("LifecycleError" if unscale_first else "UnsupportedError")
        assert "freehold.GradScaler" in errors[0][1]
    opt.zero_grad()
    assert_same(snapshot(opt), before)


@pytest.mark.parametrize("in_float16", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_of_torch_is_refused(unscale_first: bool, in_float16: bool) -> None:
    run_ranks(2, _grad_scaler, unscale_first, in_float16)


def _closed() -> None:
    model = _net()
    opt = wrap(model)
    model(data(1, 3, 8)).sum().backward()
    opt.close()
    before = weights(model)
    calls: list[Callable[[], Any]] = [
        opt.step,
        opt.zero_grad,
        lambda: opt.clip_grad_norm_(1.0),
        lambda: opt.no_sync().__enter__(),
    ]
    for call in calls:
        error = error_of(call)
        assert error == ("LifecycleError", "this optimizer was closed")
    opt.synchronize()
    assert "0.weight" in opt.describe()
    assert_same(weights(model), before)


def test_a_closed_optimizer_says_so() -> None:
    run_ranks(2, _closed)


_BAD_CLIPS: list[tuple[Any, Any, str]] = [
    (-1.0, 2.0, "PlanError"),
    (float("nan"), 2.0, "PlanError"),
    (True, 2.0, "PlanTypeError"),
    ("1.0", 2.0, "PlanTypeError"),
    (None, 2.0, "PlanTypeError"),
    (1.0, 0.0, "PlanError"),
    (1.0, -2.0, "PlanError"),
    (1.0, float("nan"), "PlanError"),
    (1.0, "inf", "PlanTypeError"),
    (1.0, False, "PlanTypeError"),
]


def _bad_clip(bad_ranks: tuple[int, ...]) -> None:
    rank, model = dist.get_rank(), _net()
    opt = wrap(model)
    model(data(rank, 3, 8)).sum().backward()
    for max_norm, norm_type, kind in _BAD_CLIPS:
        arguments = (max_norm, norm_type) if rank in bad_ranks else (1e9, 2.0)
        errors = everywhere(error_of(lambda arguments=arguments: opt.clip_grad_norm_(*arguments)))
        assert errors[0] == errors[1]
        assert errors[0] is not None
        assert errors[0][0] == kind
        assert len(bad_ranks) == 2 or f"rank {bad_ranks[0]}: " in errors[0][1]
    norms = everywhere(float(opt.clip_grad_norm_(1e9)))  # the window goes on
    assert norms[0] == norms[1] > 0
    opt.step()
    assert_ranks_agree(model)


@pytest.mark.parametrize("bad_ranks", [(1,), (0, 1)])
def test_clip_arguments(bad_ranks: tuple[int, ...]) -> None:
    run_ranks(2, _bad_clip, bad_ranks)


def _different_calls() -> None:
    rank, model = dist.get_rank(), _net()
    opt = wrap(model)
    before = snapshot(opt)
    model(data(rank, 3, 8)).sum().backward()
    errors = everywhere(error_of(opt.step if rank else lambda: opt.clip_grad_norm_(1.0)))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "ConsistencyError"
    assert "clip_grad_norm_" in errors[0][1]
    assert "step" in errors[0][1]
    assert_same(snapshot(opt), before)
    opt.clip_grad_norm_(1.0)
    opt.step()
    assert_ranks_agree(model)


def test_clip_on_one_rank_and_step_on_another() -> None:
    run_ranks(2, _different_calls)


def _different_lr() -> None:
    rank, model = dist.get_rank(), _net()
    opt = wrap(model)
    before = snapshot(opt)
    model(data(rank, 3, 8)).sum().backward()
    right = opt.param_groups[0]["lr"]
    opt.param_groups[0]["lr"] = 0.5 + rank
    errors = everywhere(error_of(opt.step))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "ConsistencyError"
    assert "1.5" in errors[0][1]
    assert_same(snapshot(opt), before)
    opt.param_groups[0]["lr"] = right
    opt.step()
    assert_ranks_agree(model)


def test_a_learning_rate_that_differs_between_ranks() -> None:
    run_ranks(2, _different_lr)


_BAD_EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "negative": lambda g: g.update(lr=-1.0),
    "string": lambda g: g.update(lr="fast"),
    "none": lambda g: g.update(lr=None),
    "vector": lambda g: g.update(lr=torch.tensor([0.1, 0.2])),
    "missing": lambda g: g.pop("momentum"),
    "rule": lambda g: g.update(rule="sgd"),
    "nan": lambda g: g.update(lr=float("nan")),
}


def _bad_edits(bad_ranks: tuple[int, ...]) -> None:
    rank, model = dist.get_rank(), _net()
    opt = wrap(model)
    index = next(i for i, g in enumerate(opt.param_groups) if g["rule"] == "matrix")
    for name, edit in _BAD_EDITS.items():
        before, good = snapshot(opt), dict(opt.param_groups[index])
        model(data(rank, 3, 8)).sum().backward()
        if rank in bad_ranks:
            edit(opt.param_groups[index])
        errors = everywhere(error_of(opt.step))
        assert errors[0] == errors[1], name
        assert errors[0] is not None, name
        assert errors[0][0] in ("RuleError", "PlanTypeError", "ConsistencyError", "PlanError"), (name, errors[0])
        assert_same(snapshot(opt), before, name)
        opt.param_groups[index].update(good)
        opt.zero_grad()
    model(data(rank, 3, 8)).sum().backward()
    opt.step()
    assert_ranks_agree(model)


@pytest.mark.parametrize("bad_ranks", [(0,), (1,), (0, 1)])
def test_an_edit_of_a_param_group_that_no_rule_can_work_with(bad_ranks: tuple[int, ...]) -> None:
    run_ranks(2, _bad_edits, bad_ranks)


def _raising_closure(when: str, then: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(23)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    opt = wrap(model, bucket_numel=1)
    assert len(opt._buckets) > 4  # more than may be in flight, so that nobody gets by on luck
    before = snapshot(opt)

    def closure(fails: bool) -> float:
        opt.zero_grad()
        if fails and when == "before":
            raise KeyError("the data loader is empty")
        output = model(data(rank, 3, 8))
        if fails and when == "in":
            output.register_hook(_raise)
        loss = output.square().sum()
        loss.backward()
        if fails and when == "after":
            raise KeyError("the data loader is empty")
        return loss.item()

    errors = everywhere(error_of(lambda: opt.step(lambda: closure(rank == 1))))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "ConsistencyError"
    assert "rank 1: 'the data loader is empty'" in errors[0][1]
    assert "KeyError" in errors[0][1], errors
    if then == "zero_grad":
        opt.zero_grad()
    if then == "close":
        opt.close()
        opt = wrap(model, bucket_numel=1)
    assert_same(snapshot(opt), before)
    values = everywhere(opt.step(lambda: closure(False)))
    assert values[0] != values[1]  # each rank gets its own loss
    assert_ranks_agree(model)


def _raise(grad: torch.Tensor) -> None:
    raise KeyError("the data loader is empty")


@pytest.mark.parametrize(
    ("when", "then"), [("before", "zero_grad"), ("in", "step"), ("after", "close"), ("before", "close")]
)
def test_a_closure_that_raises_on_one_rank_raises_on_all(when: str, then: str) -> None:
    run_ranks(2, _raising_closure, when, then)


def _changed_after_wrapping(what: str) -> None:
    rank, model = dist.get_rank(), _net()
    model[2].bias.requires_grad_(False)
    opt = wrap(model)
    before = {n: t for n, t in snapshot(opt).items() if "weights" not in n}

    def use() -> None:
        if what == "thawed":
            model[2].bias.requires_grad_(True)
        elif what == "data":
            model[0].weight.data = model[0].weight.data.clone()
        elif what == "to":
            model.to(torch.bfloat16)
        elif what == "double":
            model.double()
        dtype = model[0].weight.dtype
        model(data(rank, 3, 8, dtype=dtype)).sum().backward()
        if what == "grad":
            model[0].weight.grad = torch.ones(8, 8)
        opt.step()

    errors = everywhere(error_of(use))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "LifecycleError", errors[0]
    name = "'2.bias'" if what == "thawed" else "'0.weight'" if what in ("data", "grad") else "'"
    assert name in errors[0][1]
    assert_same({n: t for n, t in snapshot(opt).items() if "weights" not in n}, before)


@pytest.mark.parametrize("what", ["thawed", "data", "to", "double", "grad"])
def test_what_may_not_be_changed_after_wrapping(what: str) -> None:
    run_ranks(2, _changed_after_wrapping, what)


def _changed_on_one_rank() -> None:
    rank, model = dist.get_rank(), _net()
    opt = wrap(model, bucket_numel=1)
    model(data(rank, 3, 8)).sum().backward()
    if rank == 1:
        model[0].weight.grad = torch.ones(8, 8)
    errors = everywhere(error_of(opt.step))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert "rank 1: p.grad of '0.weight'" in errors[0][1]
    opt.zero_grad()
    model(data(rank, 3, 8)).sum().backward()
    opt.step()
    assert_ranks_agree(model)


def test_p_grad_replaced_on_one_rank_is_an_error_on_all() -> None:
    run_ranks(2, _changed_on_one_rank)


def test_params_cannot_be_added_later() -> None:
    opt = wrap(_net())
    num_groups = len(opt.param_groups)
    with pytest.raises(LifecycleError, match="cannot be added"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    assert len(opt.param_groups) == num_groups
    opt.close()


def _split_edited() -> None:
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    opt = LayerwiseOptimizer(model, matrix=Muon(), elementwise=None, bucket_numel=1)
    data_in = torch.ones(2, 8)
    model[2](model[1](model[0](data_in))).sum().backward()
    opt.param_groups[0]["split"] = (3, 4)
    with pytest.raises(RuleError, match=r"split.*7.*8|split.*8.*7"):
        opt.step()
    opt.param_groups[0]["split"] = None
    opt.step()
    opt.close()


def test_a_split_that_is_edited_and_fits_no_param_is_refused_on_every_rank() -> None:
    run_ranks(2, _split_edited)


def test_a_dropped_optimizer_gives_its_params_back_at_once() -> None:
    model = nn.Linear(8, 8)
    gc.disable()
    try:
        opt = LayerwiseOptimizer(model, matrix=Muon(), elementwise=AdamW())
        del opt
        LayerwiseOptimizer(model, matrix=Muon(), elementwise=AdamW()).close()
    finally:
        gc.enable()
