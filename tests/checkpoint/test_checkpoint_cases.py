"""Reported faults of comparable systems that concern checkpoints, named after their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
import worlds
from ranks import run_ranks
from torch import nn

import freehold
from freehold import AdamW, Group, LayerwiseOptimizer, Muon
from freehold.errors import CheckpointError, ConsistencyError
from freehold.runtime.checkpoint.manifest import read_manifest


def _backward(net: nn.Module, seed: int, width: int = 16, dtype: torch.dtype = torch.float32) -> None:
    net(cases.data(seed, 4, width, dtype=dtype)).float().square().mean().backward()


def _b03(root: str) -> None:
    def build(seed: int) -> tuple[nn.Sequential, LayerwiseOptimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
        return net, cases.wrap(net)

    def steps(net: nn.Module, opt: LayerwiseOptimizer, first: int, stop: int) -> None:
        for step in range(first, stop):
            _backward(net, 10 * step + dist.get_rank(), dtype=torch.bfloat16)
            opt.step()
            opt.zero_grad()

    net, opt = build(0)
    steps(net, opt, 0, 3)
    freehold.save(f"{root}/3", net, opt)
    at_3 = {name: p.detach().clone() for name, p in net.named_parameters()}
    masters = {name: fields["master"] for name, fields in opt.state_dict()["state"].items()}
    steps(net, opt, 3, 6)
    at_6 = cases.weights(net)
    opt.close()
    net, opt = build(100 + dist.get_rank())
    freehold.load(f"{root}/3", net, opt)
    for name, p in net.named_parameters():  # no forward, no step, no state_dict so far
        assert torch.equal(p, at_3[name])
        assert torch.equal(p, masters[name].bfloat16())
    steps(net, opt, 3, 6)
    cases.assert_same(cases.weights(net), at_6)
    opt.close()


def test_b03_every_rank_has_the_saved_weights_right_after_load(tmp_path: Path) -> None:
    run_ranks(2, _b03, str(tmp_path))


def test_b13_masters_are_fp32_on_disk_and_in_memory(tmp_path: Path) -> None:
    net = nn.Linear(16, 16).bfloat16()
    opt = cases.wrap(net, lr=1e-4, adam_lr=1e-4)
    for step in range(5):
        _backward(net, step, dtype=torch.bfloat16)
        opt.step()
        opt.zero_grad()
    before = opt.state_dict()["state"]
    assert not torch.equal(before["weight"]["master"], before["weight"]["master"].bfloat16().float())
    freehold.save(tmp_path / "5", net, opt)
    on_disk = {key: record.dtype for key, record in read_manifest(tmp_path / "5").tensors.items()}
    assert {dtype for key, dtype in on_disk.items() if key.startswith("optim.")} == {torch.float32}
    assert on_disk["model.weight"] == torch.bfloat16
    _backward(net, 9, dtype=torch.bfloat16)
    opt.step()
    after = cases.weights(net)
    opt.close()
    other = nn.Linear(16, 16).bfloat16()
    opt = cases.wrap(other, lr=1e-4, adam_lr=1e-4)
    freehold.load(tmp_path / "5", other, opt)
    for name, fields in opt.state_dict()["state"].items():
        worlds.assert_equal(fields, before[name])
    _backward(other, 9, dtype=torch.bfloat16)
    opt.step()
    cases.assert_same(cases.weights(other), after)
    opt.close()


def test_b13_absent_masters_are_an_error_and_rebuilt_only_when_asked(tmp_path: Path) -> None:
    net, opt = _saved_without_masters(tmp_path / "1")
    with pytest.raises(CheckpointError, match=r"'master' of param 'weight' is missing.*\n.*\n.*strict=False"):
        freehold.load(tmp_path / "1", net, opt)
    with pytest.warns(UserWarning, match="'master' of param 'weight' is missing"):
        freehold.load(tmp_path / "1", net, opt, strict=False)
    state = opt.state_dict()["state"]
    assert torch.equal(state["weight"]["master"], net.weight.float())
    opt.close()


def _saved_without_masters(path: Path) -> tuple[nn.Linear, LayerwiseOptimizer]:
    net = nn.Linear(16, 16).bfloat16()
    opt = cases.wrap(net)
    freehold.save(path, net, opt)
    worlds.resign(path, lambda body: [body["tensors"].pop(f"optim.{n}.master") for n in ("weight", "bias")])
    return net, opt


@pytest.mark.parametrize("order", ["optimizer first", "scheduler first"])
def test_b19_the_rate_in_use_is_the_schedulers_after_loading(order: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Linear, LayerwiseOptimizer, Any]:
        net = nn.Linear(16, 16, bias=False)
        opt = cases.wrap(net, elementwise=cases.PlainSGD(), matrix=cases.PlainMatrixSGD(lr=0.5))
        return net, opt, torch.optim.lr_scheduler.LambdaLR(opt, _half)

    net, opt, scheduler = build()
    for step in range(5):
        _backward(net, step)
        opt.step()
        opt.zero_grad()
        scheduler.step()
    freehold.save(tmp_path / "5", net, opt, extra=scheduler.state_dict())
    opt.close()
    net, opt, scheduler = build()
    groups = list(opt.param_groups)
    if order == "optimizer first":
        scheduler.load_state_dict(freehold.load(tmp_path / "5", net, opt))
    else:
        saved = freehold.load(tmp_path / "5", nn_copy := net, opt, restore_options=False)
        scheduler.load_state_dict(saved)
        freehold.load(tmp_path / "5", nn_copy, opt)
    assert all(a is b for a, b in zip(groups, opt.param_groups, strict=True))
    rate = 0.5 * 0.5**5
    assert scheduler.get_last_lr()[0] == opt.param_groups[0]["lr"] == rate
    before = net.weight.detach().clone()
    grad = torch.autograd.grad(net(cases.data(9, 4, 16)).square().mean(), net.weight)[0]
    _backward(net, 9)
    opt.step()
    assert torch.equal(net.weight, before - rate * grad)
    scheduler.step()
    assert opt.param_groups[0]["lr"] == rate / 2
    opt.close()


def _half(step: int) -> float:
    return 0.5**step


class _WithDead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.dead = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _b20_saved(root: Path) -> tuple[_WithDead, dict[str, Any]]:
    net = _WithDead()
    opt = cases.wrap(net, weight_decay=0.1)
    for step in range(3):
        _backward(net, step)
        opt.step()
        opt.zero_grad()
        if step == 1:
            net.second.requires_grad_(False)
    freehold.save(root, net, opt)
    state = opt.state_dict()["state"]
    opt.close()
    return net, state


def test_b20_what_is_saved_depends_on_the_model_not_on_its_history(tmp_path: Path) -> None:
    net, state = _b20_saved(tmp_path / "3")
    assert state["dead.weight"]["step"] == 0
    assert not state["dead.weight"]["momentum_buffer"].any()
    assert state["second.weight"]["step"] == 2
    assert state["second.weight"]["momentum_buffer"].any()
    fresh = _WithDead()
    opt = cases.wrap(fresh)
    freehold.load(tmp_path / "3", fresh, opt)
    for name, fields in opt.state_dict()["state"].items():
        worlds.assert_equal(fields, state[name])
    cases.assert_same(cases.weights(fresh), cases.weights(net))
    opt.close()


def test_b20_frozen_or_thawed_since_then_is_an_error_that_says_so_unless_not_strict(tmp_path: Path) -> None:
    net, state = _b20_saved(tmp_path / "frozen")
    net.requires_grad_(True)
    net.dead.requires_grad_(False)
    opt = cases.wrap(net)
    with pytest.raises(CheckpointError, match=r"'optim.dead.weight.momentum_buffer' is in the checkpoint, but has no"):
        freehold.load(tmp_path / "frozen", net, opt)
    with pytest.warns(UserWarning, match="strict=False"):
        freehold.load(tmp_path / "frozen", net, opt, strict=False)
    worlds.assert_equal(opt.state_dict()["state"]["first.weight"], state["first.weight"])
    freehold.save(tmp_path / "without dead", net, opt)
    opt.close()
    net.dead.requires_grad_(True)
    opt = cases.wrap(net)
    with pytest.raises(CheckpointError, match=r"'momentum_buffer' of param 'dead.weight' is missing") as caught:
        freehold.load(tmp_path / "without dead", net, opt)
    assert "'exp_avg' of param 'dead.bias' is missing" in str(caught.value)  # all of them at once
    with pytest.warns(UserWarning, match="strict=False"):
        freehold.load(tmp_path / "without dead", net, opt, strict=False)
    assert not opt.state_dict()["state"]["dead.weight"]["momentum_buffer"].any()
    opt.close()


class _Pair(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Parameter(torch.randn(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a @ self.b


@pytest.mark.parametrize("through", ["file", "state_dict"])
def test_b29_state_follows_the_name_not_the_position(through: str, tmp_path: Path) -> None:
    net = _Pair("ab")
    opt = cases.wrap(net)
    _backward(net, 0, width=8)
    opt.step()
    freehold.save(tmp_path / "1", net, opt)
    expected, weights = opt.state_dict(), net.state_dict()
    opt.close()
    other = _Pair("ba")
    opt = cases.wrap(other)
    if through == "file":
        freehold.load(tmp_path / "1", other, opt)
    else:
        opt.load_state_dict(expected)
        other.load_state_dict(weights)
    found = opt.state_dict()["state"]
    for name in "ab":
        worlds.assert_equal(found[name], expected["state"][name])
        assert torch.equal(getattr(other, name), getattr(net, name))
    assert not torch.equal(found["a"]["momentum_buffer"], found["b"]["momentum_buffer"])
    opt.close()


def test_b29_mixed_dtypes_round_trip_and_fp32_params_have_one_copy(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8), nn.LayerNorm(8))
    opt = cases.wrap(net)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p))
    freehold.save(tmp_path / "0", net, opt)
    keys = read_manifest(tmp_path / "0").tensors
    assert {key for key in keys if key.endswith("master")} == {"optim.0.weight.master", "optim.0.bias.master"}
    expected = cases.weights(net)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    freehold.load(tmp_path / "0", net, opt)
    cases.assert_same(cases.weights(net), expected)
    opt.close()


def _b36(net: nn.LayerNorm, opt: LayerwiseOptimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        net.weight.grad = torch.ones_like(net.weight)
        opt.step()
        opt.zero_grad()


def test_b36_small_updates_of_bf16_norms_add_up_over_a_resume(tmp_path: Path) -> None:
    def build() -> tuple[nn.LayerNorm, LayerwiseOptimizer]:
        net = nn.LayerNorm(4, bias=False).bfloat16()
        return net, LayerwiseOptimizer(net, matrix=None, elementwise=cases.PlainSGD(lr=1e-3))

    net, opt = build()
    _b36(net, opt, 100)
    assert torch.allclose(opt.state_dict()["state"]["weight"]["master"], torch.tensor(0.9), atol=1e-5)
    assert torch.equal(net.weight, torch.full((4,), 0.8984375, dtype=torch.bfloat16))
    freehold.save(tmp_path / "100", net, opt)
    _b36(net, opt, 100)
    expected = opt.state_dict()["state"]["weight"]["master"]
    opt.close()
    net, opt = build()
    freehold.load(tmp_path / "100", net, opt)
    _b36(net, opt, 100)
    worlds.assert_equal({"": opt.state_dict()["state"]["weight"]["master"]}, {"": expected})
    assert torch.allclose(expected, torch.tensor(0.8), atol=1e-5)
    opt.close()


def _b17(root: str, net: nn.Module, inputs: torch.Tensor) -> None:
    kinds = {p.ndim >= 2 for p in net.parameters()}
    options: dict[str, Any] = {} if True in kinds else {"matrix": None}
    options |= {} if False in kinds else {"elementwise": None}
    opt = cases.wrap(net, **options)
    net(inputs).square().mean().backward()
    opt.clip_grad_norm_(1.0)
    opt.step()
    opt.zero_grad()
    freehold.save(f"{root}/1", net, opt)
    expected, state = cases.weights(net), opt.state_dict()["state"]
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(7.0)
    freehold.load(f"{root}/1", net, opt)
    cases.assert_same(cases.weights(net), expected)
    for name, fields in opt.state_dict()["state"].items():
        worlds.assert_equal(fields, state[name])
    opt.close()


@pytest.mark.parametrize(
    ("net", "width"),
    [
        (nn.Linear(8, 8, bias=False), 8),
        (nn.LayerNorm(3, bias=False), 3),
        (nn.Sequential(nn.LayerNorm(5), nn.LayerNorm(5)), 5),
    ],
    ids=["one matrix", "three elements", "only norms"],
)
def test_b17_ranks_that_own_nothing_save_and_load(net: nn.Module, width: int, tmp_path: Path) -> None:
    run_ranks(4, _b17, str(tmp_path), net, cases.data(1, 2, width))
    _b17(str(tmp_path / "alone"), net, cases.data(1, 2, width))  # no process group at all


class _Tied(nn.Module):
    def __init__(self, first: str) -> None:
        super().__init__()
        parts = {"embedding": nn.Embedding(32, 8), "head": nn.Linear(8, 32, bias=False)}
        parts["head"].weight = parts["embedding"].weight
        for name in (first, *(set(parts) - {first})):
            setattr(self, name, parts[name])
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embedding(tokens)))


def test_b24_a_tied_weight_is_saved_once_and_loads_under_its_other_name(tmp_path: Path) -> None:
    net = _Tied("embedding")
    opt = cases.wrap(net)
    net(torch.arange(32)).square().mean().backward()
    opt.step()
    freehold.save(tmp_path / "1", net, opt)
    manifest = read_manifest(tmp_path / "1")
    assert manifest.tied == {"head.weight": "embedding.weight"}
    assert not any("head" in key for key in manifest.tensors)
    state = opt.state_dict()["state"]["embedding.weight"]
    opt.close()
    other = _Tied("head")
    opt = cases.wrap(other)
    freehold.load(tmp_path / "1", other, opt)
    worlds.assert_equal(opt.state_dict()["state"]["head.weight"], state)
    assert torch.equal(other.embedding.weight, net.head.weight)
    assert other.embedding.weight is other.head.weight
    opt.close()
    other.head = nn.Linear(8, 32, bias=False)
    opt = cases.wrap(other)
    with pytest.raises(CheckpointError, match="are one tensor in the checkpoint, but two here"):
        freehold.load(tmp_path / "1", other, opt)
    opt.close()


def _rank_0_alone(root: str) -> None:
    net = nn.Linear(16, 16)
    opt = cases.wrap(net)
    if dist.get_rank() == 0:
        error = cases.error_of(opt.state_dict)
    else:
        _backward(net, 0)
        error = cases.error_of(opt.step)
    kind, text = cases.everywhere(error)[0]
    assert kind == ConsistencyError.__name__
    assert "state_dict" in text, text
    assert "ranks [1]: step" in text, text


def test_b12_state_dict_on_rank_0_alone_is_an_error_everywhere_not_a_hang(tmp_path: Path) -> None:
    run_ranks(2, _rank_0_alone, str(tmp_path))


def test_options_follow_the_names_of_params_into_other_groups(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    opt = cases.wrap(net, groups=[Group("0.*", lr=0.5), Group("1.*", lr=0.25)])
    freehold.save(tmp_path / "0", net, opt)
    opt.close()
    opt = LayerwiseOptimizer(net, matrix=Muon(), elementwise=AdamW(), groups=[Group("1.*"), Group("0.*")])
    freehold.load(tmp_path / "0", net, opt)
    assert [(g["pattern"], g["lr"]) for g in opt.param_groups if g["params"]] == [
        ("1.*", 0.25),
        ("1.*", 0.25),
        ("0.*", 0.5),
        ("0.*", 0.5),
    ]
    opt.close()
    opt = LayerwiseOptimizer(net, matrix=Muon(), elementwise=AdamW())
    with pytest.raises(CheckpointError, match="different options when they were saved; make the same groups"):
        freehold.load(tmp_path / "0", net, opt)
    freehold.load(tmp_path / "0", net, opt, restore_options=False)
    opt.close()


class _Counting(nn.Linear):
    def get_extra_state(self) -> int:
        return 5

    def set_extra_state(self, state: int) -> None:
        assert state == 5


def test_extra_state_of_modules_is_not_lost_in_silence(tmp_path: Path) -> None:
    net = _Counting(8, 8)
    opt = cases.wrap(net)
    with pytest.warns(UserWarning, match="have extra state"):
        freehold.save(tmp_path / "0", net, opt)
    opt.close()
