"""What must come back as it went in, and loads that must be the same on all ranks, or none."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
import worlds
from ranks import run_ranks
from torch import nn
from torch.distributed import checkpoint as dcp

import freehold
from freehold import TorchRule
from freehold.errors import CheckpointError
from freehold.rules.base import Span
from freehold.runtime.checkpoint import saving


class Hollow(nn.Linear):
    """Has buffers without elements, as a cache has before its first use."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("no_columns", torch.empty(3, 0, dtype=torch.int64))


def _hollow(root: str) -> None:
    net = Hollow()
    opt = cases.wrap(net)
    extra = {
        "none": torch.empty(0, 4),
        "some": torch.ones(2, dtype=torch.bfloat16),
        "array": np.empty((2, 0), dtype=np.int16),
    }
    freehold.save(f"{root}/0", net, opt, extra=extra)
    other = Hollow()
    opt.close()
    opt = cases.wrap(other, bucket_numel=None)
    found = freehold.load(f"{root}/0", other, opt)
    assert (found["none"].shape, found["none"].dtype) == ((0, 4), torch.float32)
    assert torch.equal(found["some"], extra["some"])
    assert (found["array"].shape, found["array"].dtype) == ((2, 0), np.int16)
    if dist.get_rank() == 0:
        cases.assert_same(cases.weights(other), cases.weights(net))
    opt.close()


def test_tensors_without_elements_are_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(2, _hollow, str(tmp_path))
    wanted = {"model.nothing": torch.empty(0), "model.weight": torch.zeros(8, 8)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, storage_reader=freehold.CheckpointReader(tmp_path / "0"), no_dist=True)
    assert wanted["model.weight"].count_nonzero() > 0
    worlds.resign(tmp_path / "0", lambda body: body["tensors"]["model.nothing"].update(shape=[1]))
    net = Hollow()
    opt = cases.wrap(net)
    with pytest.raises(CheckpointError, match=r"chunks of 'model.nothing' are missing"):
        freehold.load(tmp_path / "0", net, opt)
    opt.close()


def test_dicts_keep_the_order_of_their_keys(tmp_path: Path) -> None:
    net = nn.Linear(8, 8)
    opt = cases.wrap(net)
    freehold.save(tmp_path / "0", net, opt, extra={"z": 1, "a": [{"y": 0, "b": 1, "x": 2}], 3: {"n": 1, "m": 2}})
    found = freehold.load(tmp_path / "0", net, opt)
    assert [list(found), list(found["a"][0]), list(found[3])] == [["z", "a", 3], ["y", "b", "x"], ["n", "m"]]
    opt.close()


def test_options_in_a_state_dict_are_nobody_elses(tmp_path: Path) -> None:
    """A learning rate that is a tensor is changed in place: in the live groups, not in the snapshot."""
    net = nn.Linear(8, 8)
    opt = cases.wrap(net)
    opt.param_groups[0]["lr"] = torch.tensor(0.1)
    state = opt.state_dict()
    for _ in range(2):
        opt.param_groups[0]["lr"].fill_(0.7)
        opt.load_state_dict(state)
        assert float(opt.param_groups[0]["lr"]) == float(torch.tensor(0.1))
    opt.close()


@pytest.mark.parametrize("through", ["file", "state_dict"])
def test_another_optimizer_inside_a_torch_rule_is_another_rule(through: str, tmp_path: Path) -> None:
    def wrap(net: nn.Module, optimizer: type[torch.optim.Optimizer]) -> Any:
        return cases.wrap(net, matrix=TorchRule(optimizer, lr=0.1), elementwise=None)

    net = nn.Linear(8, 8, bias=False)
    opt = wrap(net, torch.optim.SGD)
    freehold.save(tmp_path / "0", net, opt)
    state = opt.state_dict()
    opt.close()
    opt = wrap(net, torch.optim.Adagrad)
    with pytest.raises(CheckpointError, match=r"was updated by TorchRule\(SGD\), and now is by TorchRule\(Adagrad\)"):
        _ = freehold.load(tmp_path / "0", net, opt) if through == "file" else opt.load_state_dict(state)
    opt.close()


def _slow_prune(root: str) -> None:
    prune = saving.prune

    def slow(directory: Path, keep: int) -> None:
        time.sleep(2.5)
        prune(directory, keep)

    net = nn.Linear(8, 8)
    opt = cases.wrap(net, timeout_s=1.0)
    saving.prune = slow
    try:
        handle = freehold.async_save(f"{root}/0", net, opt, keep=1)
        if dist.get_rank() == 0:
            while freehold.latest(root) is None:  # published, and now pruning
                time.sleep(0.01)
        handle.wait()
    finally:
        saving.prune = prune
    opt.close()


def test_pruning_may_take_longer_than_timeout_s(tmp_path: Path) -> None:
    run_ranks(2, _slow_prune, str(tmp_path))
    assert freehold.latest(tmp_path) == tmp_path / "0"


def _raise_step(state: dict[str, Any]) -> None:
    state["state"]["0.weight"]["step"] += 1


def _raise_rate(state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] *= 2


def _swap_groups(state: dict[str, Any]) -> None:
    state["param_groups"].reverse()


def _spoil_objects(state: dict[str, Any]) -> None:
    state["state"]["0.weight"]["objects"] = [{"sum": object()}]


DIFFERENCES = {
    "step": (_raise_step, "ranks disagree: step counters"),
    "rate": (_raise_rate, "ranks disagree: options"),
    "groups": (_swap_groups, "ranks disagree: names and shapes"),
    "objects": (_spoil_objects, "is a builtins.object"),
}


def _load_different(what: str) -> tuple[str, str] | None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = cases.wrap(net, timeout_s=5.0)
    net(cases.data(0, 2, 8)).sum().backward()
    opt.step()
    opt.zero_grad()
    state = copy.deepcopy(opt.state_dict())
    if dist.get_rank() == 1:
        DIFFERENCES[what][0](state)
    before = cases.snapshot(opt)
    error = cases.error_of(lambda: opt.load_state_dict(state))
    cases.assert_same(cases.snapshot(opt), before)
    net(cases.data(1, 2, 8)).sum().backward()
    opt.step()  # nothing was loaded, and nothing is broken
    opt.close()
    return error


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_state_dict_that_differs_between_ranks_is_refused_by_all(what: str) -> None:
    first, second = run_ranks(2, _load_different, what)
    assert first == second
    assert first is not None
    assert DIFFERENCES[what][1] in first[1], first


class _FailingOnce(cases.PlainMatrixSGD):
    """Raises, on the rank that owns the matrix."""

    calls: ClassVar[list[int]] = []

    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        self.calls.append(1)
        raise ZeroDivisionError("a rule of the user's")


def _half_updated(root: str) -> None:
    _FailingOnce.calls.clear()
    net = nn.Linear(8, 8, bias=False)  # one rank owns it alone
    opt = cases.wrap(net, matrix=_FailingOnce(), elementwise=None, timeout_s=20.0)
    freehold.save(f"{root}/0", net, opt)
    net(cases.data(0, 2, 8)).sum().backward()
    error = cases.error_of(opt.step)
    assert error == (("ZeroDivisionError", "a rule of the user's") if _FailingOnce.calls else None)
    for call in (lambda: freehold.save(f"{root}/1", net, opt), opt.state_dict, opt.verify):
        found = cases.everywhere(cases.error_of(call))
        assert found[0] == found[1]
        assert found[0][0] == "LifecycleError"
        assert "a rule of the user's" in found[0][1]
    freehold.load(f"{root}/0", net, opt)
    freehold.save(f"{root}/2", net, opt)
    opt.close()


def test_what_an_update_left_half_done_is_not_saved(tmp_path: Path) -> None:
    run_ranks(2, _half_updated, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0", "2"]
