"""Optimizers of torch and of another library as rules: equal to the optimizer itself, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from pytorch_optimizer import SOAP, ScheduleFreeSGD  # type: ignore[import-untyped]
from torch import Tensor

from freehold.errors import RuleError
from freehold.rules import AdaMuon, AdamW, Muon, TorchRule
from freehold.rules.nested import flatten, unflatten


class Shampoo(torch.optim.Optimizer):
    """Gupta et al., https://arxiv.org/abs/1802.09568, with its roots taken at every step."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0, eps: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["factors"] = tuple(torch.eye(size) * group["eps"] for size in param.shape)
                    state["step"] = 0
                state["step"] += 1
                left, right = state["factors"]
                left += param.grad @ param.grad.mT
                right += param.grad.mT @ param.grad
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * _inverse_fourth_root(left) @ param.grad @ _inverse_fourth_root(right))


def _inverse_fourth_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-12) ** -0.25 @ vectors.mT


SHAPES = ((7, 13), (16, 8), (16, 8), (3, 6, 10), (1, 9))
OPTIMIZERS: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.Muon, {"lr": 0.05}),
    (torch.optim.NAdam, {"lr": 0.01, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    (SOAP, {"lr": 0.01, "precondition_frequency": 2}),
    (Shampoo, {"lr": 0.1}),
    (ScheduleFreeSGD, {"lr": 0.1, "warmup_steps": 3, "foreach": False}),  # counts in options of its group
)
EACH = pytest.mark.parametrize(
    ("optimizer_class", "kwargs"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", "")
)


@EACH
def test_bits_are_those_of_the_optimizer_itself(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any], flat_params: Any
) -> None:
    params = [torch.randn(shape) for shape in SHAPES]
    flat = flat_params.of(TorchRule(optimizer_class, **kwargs), params)
    matrices = [torch.nn.Parameter(m.clone()) for p in params for m in (p if p.ndim == 3 else p[None])]
    optimizer = optimizer_class(matrices, **kwargs)  # type: ignore[call-arg]
    for step in range(1, 6):
        flat.options["lr"] = optimizer.param_groups[0]["lr"] = kwargs["lr"] / step  # a schedule
        grads = [torch.randn(shape) for shape in SHAPES]
        for matrix, grad in zip(matrices, (m for g in grads for m in (g if g.ndim == 3 else g[None])), strict=True):
            matrix.grad = grad.clone()
        flat.update(grads, step)
        optimizer.step()
    found = [m for p in flat.split(flat.param) for m in (p if p.ndim == 3 else p[None])]
    for ours, theirs in zip(found, matrices, strict=True):
        assert torch.equal(ours, theirs.detach())


@EACH
def test_a_run_that_is_stopped_and_resumed_goes_on_alike(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any], flat_params: Any
) -> None:
    params = [torch.randn(shape) for shape in SHAPES]
    through, first = (flat_params.of(TorchRule(optimizer_class, **kwargs), params) for _ in range(2))
    grads = [[torch.randn(shape) for shape in SHAPES] for _ in range(6)]
    for step in range(1, 7):
        through.update(grads[step - 1], step)
    for step in range(1, 4):
        first.update(grads[step - 1], step)
    copies = [
        {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()} for state in first.per_matrix
    ]
    resumed = dataclasses.replace(
        first, rule=TorchRule(optimizer_class, **kwargs), param=first.param.clone(), per_matrix=copies
    )
    for step in range(4, 7):
        resumed.update(grads[step - 1], step)
    assert torch.equal(resumed.param, through.param)
    for ours, theirs in zip(resumed.per_matrix, through.per_matrix, strict=True):
        assert list(ours) == list(theirs)
        assert all(torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])) for name in ours)


@EACH
def test_state_is_tensors_and_numbers_alone(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any], flat_params: Any
) -> None:
    flat = flat_params.of(TorchRule(optimizer_class, **kwargs), [torch.randn(8, 12)])
    flat.update([torch.randn(8, 12)], 1)
    (state,) = flat.per_matrix
    assert state
    assert all(isinstance(value, (Tensor, int, float)) for value in state.values())


def test_what_an_optimizer_keeps_in_its_group_is_kept(flat_params: Any) -> None:
    flat = flat_params.of(TorchRule(SOAP), [torch.randn(8, 12), torch.randn(8, 12)])
    for step in (1, 2, 3):
        flat.update([torch.randn(8, 12), torch.randn(8, 12)], step)
    assert [state["group:step"] for state in flat.per_matrix] == [3, 3]


def test_options_that_an_optimizer_counts_in_are_kept_and_lr_is_still_edited(flat_params: Any) -> None:
    params = [torch.randn(8, 12), torch.randn(3, 6, 10)]
    flat = flat_params.of(TorchRule(ScheduleFreeSGD, lr=0.1, weight_lr_power=1.0, foreach=False), params)
    for step, lr in enumerate((0.1, 0.4, 0.2), start=1):
        flat.options["lr"] = lr
        flat.update([torch.randn(p.shape) for p in params], step)
    assert len(flat.per_matrix) == 4
    for state in flat.per_matrix:
        assert {name for name in state if name.startswith("group:")} == {
            "group:step",
            "group:lr_max",
            "group:weight_sum",
        }
        assert state["group:lr_max"] == 0.4  # reached at step 2, remembered at step 3
        assert state["group:weight_sum"] == pytest.approx(0.1 + 0.4 + 0.4)
    assert flat.options["weight_sum"] == 0.0


class _Counts(torch.optim.Optimizer):
    """SGD that counts in options of every kind, in place where it can, and may write its own lr."""

    def __init__(self, params: Any, lr: float | Tensor = 0.5, own_lr: float | None = None) -> None:
        defaults = {"lr": lr, "weight_decay": 0.0, "own_lr": own_lr, "scale": torch.ones(())}
        super().__init__(params, {**defaults, "seen": [], "table": {"steps": torch.zeros(2)}, "hook": len})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["scale"].mul_(0.5)
        group["seen"].append(float(group["scale"]))
        group["table"]["steps"][0] += 1
        if group["own_lr"] is not None:
            group["lr"] = group["own_lr"]
        for param in group["params"]:
            param.sub_(param.grad * group["lr"] * group["scale"])


def test_options_that_are_changed_in_place_are_kept_for_each_matrix_and_the_rule_is_not_changed(
    flat_params: Any,
) -> None:
    rule = TorchRule(_Counts)
    flat = flat_params.of(rule, [torch.zeros(8, 8)] * 2)
    for step in (1, 2, 3):
        flat.update([torch.ones(8, 8)] * 2, step, cuts=[64] if step == 2 else [])
    assert torch.equal(flat.param, torch.full((128,), -0.5 * (0.5 + 0.25 + 0.125)))
    for state in flat.per_matrix:
        assert [state[f"group:seen/l{i}"] for i in range(3)] == [0.5, 0.25, 0.125]
        assert state["group:scale"] == 0.125
        assert torch.equal(state["group:table/dsteps"], torch.tensor([3.0, 0.0]))
        assert len(state) == 5
    assert flat.options["scale"] == 1.0
    assert rule.defaults()["scale"] == 1.0


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_an_lr_that_the_optimizer_changes_itself_is_refused(lr: Any, flat_params: Any) -> None:
    flat = flat_params.of(TorchRule(_Counts, lr=lr), [torch.zeros(4, 4)])
    flat.update([torch.ones(4, 4)], 1)
    flat.options["own_lr"] = 0.25
    with pytest.raises(RuleError, match=r"_Counts changes its option 'lr' in step\(\), from .*0\.5.* to 0\.25"):
        flat.update([torch.ones(4, 4)], 2)
    flat.options["own_lr"] = lr  # written, but to the same value
    flat.update([torch.ones(4, 4)], 2)


def test_labels_tell_optimizers_apart() -> None:
    assert TorchRule(torch.optim.Muon).label == "TorchRule(Muon)"
    assert TorchRule(Shampoo, lr=0.5).label == "TorchRule(Shampoo)"
    assert [rule.label for rule in (Muon(), AdaMuon(), AdamW())] == ["Muon", "AdaMuon", "AdamW"]


def test_options_are_the_defaults_that_a_group_can_show() -> None:
    assert TorchRule(Shampoo, lr=0.5).defaults() == {"lr": 0.5, "weight_decay": 0.0, "eps": 1e-4}
    assert repr(TorchRule(Shampoo, lr=0.5)) == "TorchRule(Shampoo, lr=0.5)"


class _KeepsObjects(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["helper"] = object()


def test_state_that_cannot_be_saved_is_refused(flat_params: Any) -> None:
    flat = flat_params.of(TorchRule(_KeepsObjects, foreach=False), [torch.zeros(4, 4)])
    with pytest.raises(RuleError, match="optimizer state 'helper' is a object; only tensors"):
        flat.update([torch.zeros(4, 4)], 1)


@pytest.mark.parametrize("given", [torch.nn.Linear, "Muon", None, torch.optim.SGD([torch.zeros(1)], lr=1.0)])
def test_only_optimizer_classes_are_taken(given: Any) -> None:
    with pytest.raises(RuleError, match=r"takes a subclass of torch\.optim\.Optimizer, got"):
        TorchRule(given)


def test_arguments_that_the_optimizer_refuses_are_shown() -> None:
    with pytest.raises(RuleError, match=r"Muon\(\{'momentums': 1\}\): .*momentums"):
        TorchRule(torch.optim.Muon, momentums=1)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"step": 1, "exp_avg": torch.ones(2)},
        {"GG": [torch.ones(2), []], "Q": [None, (1, 2.5), ()], "deep": {"a": {"b": [True]}, "empty": {}}},
        {"many": list(range(12))},
    ],
    ids=str,
)
def test_nested_state_comes_back(state: dict[str, Any]) -> None:
    flat = flatten(state)
    assert all(isinstance(value, (Tensor, int, float)) for value in flat.values())
    assert str(unflatten(flat)) == str(state)


@pytest.mark.parametrize("state", [{"name": "text"}, {"a": {1: 2}}, {"a": {"b/c": 2}}, {"a": {2}}], ids=str)
def test_other_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(RuleError, match="optimizer state"):
        flatten(state)


@pytest.mark.parametrize("state", [{"exp/avg": 1}, {"ok": 1, "a/l0": torch.ones(2)}, {"/": None}, {3: 1}], ids=str)
def test_names_that_would_not_come_back_are_refused(state: dict[Any, Any]) -> None:
    (name,) = state.keys() - {"ok"}
    with pytest.raises(RuleError, match=f"optimizer state has a name {name!r}: .*string without '/'; rename"):
        flatten(state)
