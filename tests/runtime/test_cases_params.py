"""Reported cases about param groups, schedulers, routing, dtypes and sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    PlainMatrixSGD,
    PlainSGD,
    assert_ranks_agree,
    counting_newton_schulz,
    data,
    error_of,
    everywhere,
    reduced,
    weights,
    wrap,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler

from freehold import AdamW, Group, LayerwiseOptimizer, Muon
from freehold.errors import RoutingError, UnsupportedError


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(15)
        self.a, self.norm, self.b = nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


def _three_groups(model: nn.Module, matrix_lr: float = 0.4, norm_lr: float = 0.2) -> LayerwiseOptimizer:
    """Groups: norms, matrices, and one that stays empty because the norms were taken by the first."""
    return LayerwiseOptimizer(
        model,
        matrix=PlainMatrixSGD(lr=matrix_lr),
        elementwise=PlainSGD(lr=0.1),
        groups=[Group("norm.*", lr=norm_lr)],
        bucket_numel=1,
    )


def _assert_updates_use(model: nn.Module, opt: LayerwiseOptimizer, lrs: dict[str, float]) -> None:
    """One step by all ranks; every owner's update must be exactly -lr * gradient."""
    rank = dist.get_rank()
    before = weights(model)
    model(data(int(torch.randint(10**6, ())) + rank, 4, 8)).square().mean().backward()
    grads = reduced(opt)
    opt.step()
    opt.zero_grad()
    for name, now in weights(model).items():
        lr = next(lr for pattern, lr in lrs.items() if pattern in name)
        expected = before[name].flatten().add(grads[name], alpha=-lr)
        assert torch.equal(now.flatten(), expected), name


def _lambda_lr() -> None:
    model = Small()
    opt = _three_groups(model)
    assert isinstance(opt, torch.optim.Optimizer)
    assert [(g["pattern"], g["rule"], len(g["params"])) for g in opt.param_groups] == [
        ("norm.*", "elementwise", 2),
        ("*", "matrix", 2),
        ("*", "elementwise", 0),
    ]
    scheduler = lr_scheduler.LambdaLR(opt, lambda s: 0.5**s)
    for n in range(4):
        lrs = [group["lr"] for group in opt.param_groups]
        assert everywhere(lrs) == [[0.2 * 0.5**n, 0.4 * 0.5**n, 0.1 * 0.5**n]] * 3
        _assert_updates_use(model, opt, {"norm": lrs[0], "weight": lrs[1]})
        scheduler.step()
    assert_ranks_agree(model)


def _one_cycle() -> None:
    model = Small()
    opt = _three_groups(model)
    plain = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(3)], lr=0.1)
    make = lr_scheduler.OneCycleLR
    schedulers = [make(o, max_lr=[0.3, 0.2, 0.1], total_steps=6, cycle_momentum=False) for o in (opt, plain)]
    for _ in range(5):
        lrs = [group["lr"] for group in opt.param_groups]
        assert lrs == [group["lr"] for group in plain.param_groups]
        _assert_updates_use(model, opt, {"norm": lrs[0], "weight": lrs[1]})
        plain.step()
        for scheduler in schedulers:
            scheduler.step()


def _on_plateau() -> None:
    model = Small()
    opt = _three_groups(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, factor=0.1, patience=0)
    for loss in (1.0, 1.0, 1.0):
        _assert_updates_use(model, opt, {"norm": opt.param_groups[0]["lr"], "weight": opt.param_groups[1]["lr"]})
        scheduler.step(loss)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.002, 0.004, 0.001])
    _assert_updates_use(model, opt, {"norm": opt.param_groups[0]["lr"], "weight": opt.param_groups[1]["lr"]})


@pytest.mark.parametrize("function", [_lambda_lr, _one_cycle, _on_plateau])
def test_b18_all_ranks_have_all_groups_and_owners_use_the_scheduled_lr(function: Any) -> None:
    run_ranks(3, function)


def _restored() -> None:
    model = Small()
    opt = _three_groups(model)
    scheduler = lr_scheduler.LambdaLR(opt, lambda s: 0.5**s)
    for _ in range(5):
        _assert_updates_use(model, opt, {"norm": opt.param_groups[0]["lr"], "weight": opt.param_groups[1]["lr"]})
        scheduler.step()
    saved = copy.deepcopy(scheduler.state_dict())
    error = error_of(lambda: opt.load_state_dict({}))  # whatever is no whole state is refused
    assert error is not None
    assert error[0] == "CheckpointError"
    opt.close()
    fresh = Small()
    opt = _three_groups(fresh)
    resumed = lr_scheduler.LambdaLR(opt, lambda s: 0.5**s)
    resumed.load_state_dict(saved)
    for group, lr in zip(opt.param_groups, resumed.get_last_lr(), strict=True):
        group["lr"] = lr  # as torch documents it: a scheduler's load_state_dict leaves the optimizer to the optimizer
    assert resumed.get_last_lr() == [0.2 * 0.5**5, 0.4 * 0.5**5, 0.1 * 0.5**5]
    _assert_updates_use(fresh, opt, {"norm": 0.2 * 0.5**5, "weight": 0.4 * 0.5**5})
    resumed.step()
    assert resumed.get_last_lr() == [group["lr"] for group in opt.param_groups] == [0.2 / 64, 0.4 / 64, 0.1 / 64]
    _assert_updates_use(fresh, opt, {"norm": 0.2 / 64, "weight": 0.4 / 64})
    opt.param_groups[1]["lr"] = 0.7  # an edit by hand
    _assert_updates_use(fresh, opt, {"norm": 0.2 / 64, "weight": 0.7})
    opt.param_groups[1] = {**opt.param_groups[1], "lr": 0.3}  # the dict itself replaced, as load_state_dict would
    _assert_updates_use(fresh, opt, {"norm": 0.2 / 64, "weight": 0.3})
    opt.param_groups[1]["lr"] = torch.tensor(0.25)
    _assert_updates_use(fresh, opt, {"norm": 0.2 / 64, "weight": 0.25})


def test_b19_the_lr_that_acts_is_that_of_the_public_group() -> None:
    """Groups are read live, so no copy can go stale; tests/checkpoint has the same with the optimizer's state."""
    run_ranks(2, _restored)


def _weight_decay_live() -> None:
    model = nn.Linear(8, 8)
    opt = wrap(model, lr=0.1, adam_lr=0.1, weight_decay=0.0)
    before = weights(model)
    for group in opt.param_groups:
        group["weight_decay"] = 0.5
    (model.weight.sum() * 0.0 + model.bias.sum() * 0.0).backward()  # used, with zero gradients: decay alone
    opt.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * 0.95, rtol=1e-6, atol=0)


def test_b19_an_edit_of_weight_decay_takes_effect_at_the_next_step() -> None:
    run_ranks(2, _weight_decay_live)


class Language(nn.Module):
    def __init__(self, tied: bool, head_first: bool, head_name: str = "head") -> None:
        super().__init__()
        torch.manual_seed(16)
        embedding, head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        if tied:
            head.weight = embedding.weight
        order = [(head_name, head), ("tokens", embedding)]
        for name, module in order if head_first else reversed(order):
            self.add_module(name, module)
        self.body = nn.Linear(8, 8)
        self.head_name = head_name

    def forward(self, tokens: Tensor) -> Tensor:
        return self.get_submodule(self.head_name)(torch.tanh(self.body(self.tokens(tokens))))


def _routed(tied: bool, head_first: bool, head_name: str) -> None:
    rank = dist.get_rank()
    model = Language(tied, head_first, head_name)
    head = model.get_submodule(head_name)
    opt = wrap(model, bucket_numel=1)
    for step in range(3):
        tokens = torch.randint(32, (2, 5), generator=torch.Generator().manual_seed(2 * step + rank))
        model(tokens).square().mean().backward()
        squares = sum(g.double().square().sum() for g in reduced(opt).values())
        assert float(opt.clip_grad_norm_(1e9)) == pytest.approx(float(squares) ** 0.5, rel=1e-6)
        opt.step()
        opt.zero_grad()
    assert (head.weight is model.tokens.weight) == tied
    rules = {name: group["rule"] for name, group in _group_of_name(model, opt).items()}
    assert rules["tokens.weight"] == rules[f"{head_name}.weight"] == "elementwise"
    assert (rules["body.weight"], rules["body.bias"]) == ("matrix", "elementwise")
    embeddings = [p for p in opt._params if p.param is head.weight or p.param is model.tokens.weight]
    assert len(embeddings) == (1 if tied else 2)
    names = {"tokens.weight", f"{head_name}.weight"}
    slots = [slot for b in opt.layout.buckets for slot in b.slots if slot.name in names]
    assert sum(slot.numel for slot in slots) == 256 * len(embeddings)
    assert len({slot.name for slot in slots}) == len(embeddings)
    table = opt.describe()
    for name in names:
        assert name in table
    assert ("tied to" in table) == tied
    assert_ranks_agree(model)


def _group_of_name(model: nn.Module, opt: LayerwiseOptimizer) -> dict[str, dict[str, Any]]:
    by_id = {id(p): group for group in opt.param_groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize(("tied", "head_name"), [(True, "head"), (False, "head"), (False, "to_words"), (True, "zzz")])
def test_b24_embeddings_and_heads_are_elementwise_whatever_the_order(
    tied: bool, head_first: bool, head_name: str
) -> None:
    run_ranks(2, _routed, tied, head_first, head_name)


def test_b24_overlapping_groups_go_to_the_first_match_and_a_shadowed_one_is_an_error() -> None:
    """The choice made: first match wins; a group that is left with nothing raises, so no overlap goes unnoticed."""
    model = Language(False, False)
    with pytest.raises(RoutingError, match="takes no param"):
        wrap(model, groups=[Group("body.*", lr=0.1), Group("body.weight", lr=0.2)])
    opt = wrap(model, groups=[Group("body.weight", lr=0.2), Group("body.*", lr=0.1)])
    assert {n: g["lr"] for n, g in _group_of_name(model, opt).items() if "body" in n} == {
        "body.weight": 0.2,
        "body.bias": 0.1,
    }
    opt.close()


class Fourteen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.layers = nn.ModuleList(nn.Linear(8, 8) if i % 2 else nn.Linear(8, 8, bias=False) for i in range(14))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _newton_schulz_runs() -> int:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = Fourteen()
    opt = wrap(model, bucket_numel=200)
    with counting_newton_schulz() as counts:
        for step in range(3):
            model(data(700 + step + rank, 3, 8)).sum().backward()
            opt.step()
            opt.zero_grad()
    table = opt.describe()
    assert table.count(" matrix ") >= 14
    for name, _ in model.named_parameters():
        assert name in table
    opt.close()
    return sum(counts)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_b25_newton_schulz_really_runs_once_per_matrix_and_step(num_ranks: int) -> None:
    counts = [_newton_schulz_runs()] if num_ranks == 1 else run_ranks(num_ranks, _newton_schulz_runs)
    assert sum(counts) == 14 * 3
    assert all(counts)


def test_b25_muon_without_a_matrix_or_on_placeholders_is_an_error() -> None:
    with pytest.raises(RoutingError, match="no param is a matrix"):
        LayerwiseOptimizer(nn.LayerNorm(8), matrix=Muon(), elementwise=AdamW())
    with pytest.raises(RoutingError, match="no param is a matrix"):
        LayerwiseOptimizer(nn.Embedding(16, 8), matrix=Muon(), elementwise=AdamW())
    with torch.device("meta"):
        on_meta = nn.Linear(8, 8)
    with pytest.raises(UnsupportedError, match="meta"):
        wrap(on_meta)
    empty = nn.Linear(8, 8)
    empty.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(UnsupportedError, match="no elements"):
        wrap(empty)
    assert issubclass(UnsupportedError, RuntimeError)
    opt = LayerwiseOptimizer(nn.LayerNorm(8), matrix=None, elementwise=AdamW())  # the explicit way to have none
    opt.close()
