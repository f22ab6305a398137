"""State of every form passes through a checkpoint and a state dict: by element, by row, in objects."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import cases
import pytest
import torch
import torch.distributed as dist
import worlds
from ranks import run_ranks
from torch import nn

import freehold
from freehold import NorMuon
from freehold.errors import CheckpointError
from freehold.plan.spec import RuleKind
from freehold.rules.base import Span


@dataclass(frozen=True, slots=True)
class Remembering(cases.PlainMatrixSGD):
    """Keeps tensors and numbers of every kind for each matrix."""

    keeps_objects: ClassVar[bool] = True

    @torch.no_grad()
    def update(self, span: Span, options: Any) -> None:
        for kept, matrix in zip(span.per_matrix, _matrices(span, span.grad), strict=True):
            kept["sum"] = kept.get("sum", 0.0) + float(matrix.sum())
            kept["count"] = kept.get("count", 0) + 1
            kept["left"] = kept.get("left", 0.0) + matrix @ matrix.T
            kept["seen"] = True
        span.param.add_(span.grad, alpha=-1e-3 * float(options["lr"]))


@dataclass(frozen=True, slots=True)
class RememberingElements(Remembering):
    """The same where shards may cut anywhere, which cannot be saved."""

    kind: ClassVar[RuleKind] = "elementwise"

    @torch.no_grad()
    def update(self, span: Span, options: Any) -> None:
        for kept in span.per_matrix:
            kept["count"] = 1


@dataclass(frozen=True, slots=True)
class Summing(Remembering):
    """Adds to its own tensor in place, as optimizers of torch do."""

    @torch.no_grad()
    def update(self, span: Span, options: Any) -> None:
        for kept, matrix in zip(span.per_matrix, _matrices(span, span.grad), strict=True):
            kept.setdefault("sum", torch.zeros_like(matrix)).add_(matrix)


def _matrices(span: Span, flat: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for block in span.blocks:
        rows, cols = block.shape[-2:]
        part = flat[block.offset : block.offset + torch.Size(block.shape).numel()]
        found += part.view(-1, rows, cols).unbind()
    return found


RULES = {"rows": NorMuon(lr=0.02), "objects": Remembering()}


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, fields in state["state"].items():
        for key, value in fields.items():
            if key == "objects":
                for index, kept in enumerate(value):
                    flat |= {f"{name} {index} {k}": v for k, v in kept.items()}
            else:
                flat[f"{name} {key}"] = value
    return flat


def _save(folder: str, form: str) -> None:
    net = worlds.make(torch.bfloat16)
    opt = worlds.wrap(net, matrix=RULES[form])
    worlds.train(net, opt, 0, 2)
    freehold.save(os.path.join(folder, "2"), net, opt)
    state = opt.state_dict()
    if dist.get_rank() == 0:
        torch.save((state, freehold.full_state_dict(net)), os.path.join(folder, "state.pt"))
    opt.close()


def _load(folder: str, form: str, through: str) -> None:
    net = worlds.make(torch.bfloat16, seed=60 + dist.get_rank())
    opt = worlds.wrap(net, matrix=RULES[form], bucket_numel=None, policy="packed")
    worlds.train(net, opt, 8, 9)
    state, weights = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
    if through == "file":
        freehold.load(os.path.join(folder, "2"), net, opt)
    else:
        opt.load_state_dict(state)
        net.load_state_dict(weights)
    expected, found = _flat(state), _flat(opt.state_dict())
    assert found.keys() == expected.keys()
    worlds.assert_equal(found, expected)
    if form == "rows":
        assert found["up row_second_moment"].shape == (4, 20)
        assert found["convolution.weight row_second_moment"].shape == (24,)
        assert found["out.weight row_second_moment"].count_nonzero() == 24
    else:
        assert [type(found[f"up 3 {key}"]) for key in ("sum", "count", "seen")] == [float, int, bool]
        assert found["down 0 left"].shape == (24, 24)
    worlds.train(net, opt, 9, 10)
    opt.close()


@pytest.mark.parametrize("through", ["file", "state_dict"])
@pytest.mark.parametrize("form", RULES)
def test_state_of_every_form_loads_at_another_number_of_ranks(form: str, through: str, tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), form)
    run_ranks(3, _load, str(tmp_path), form, through)


def test_objects_that_shard_edges_cut_are_refused_when_saving(tmp_path: Path) -> None:
    net = nn.Linear(8, 8)
    opt = cases.wrap(net, elementwise=RememberingElements())
    net(torch.ones(2, 8)).sum().backward()
    opt.step()
    with pytest.raises(CheckpointError, match="the rule of param 'bias' keeps objects for a part"):
        freehold.save(tmp_path / "0", net, opt)
    opt.close()


def test_steps_change_no_state_dict_that_was_loaded_before_them(tmp_path: Path) -> None:
    """One snapshot, loaded twice with a step in between, gives the same state twice."""
    net = nn.Linear(8, 8, bias=False)
    opt = cases.wrap(net, matrix=Summing(), elementwise=None)

    def step() -> dict[str, Any]:
        net(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
        return _flat(opt.state_dict())

    step()
    state = opt.state_dict()
    expected = copy.deepcopy(_flat(state))
    after: list[dict[str, Any]] = []
    for _ in range(2):
        opt.load_state_dict(state)
        worlds.assert_equal(_flat(state), expected)
        after.append(step())
    worlds.assert_equal(_flat(state), expected)
    worlds.assert_equal(after[1], after[0])
    opt.close()
