from __future__ import annotations

import pytest
import torch

from freehold import CostModel
from freehold.errors import PlanError, RuleError
from freehold.plan import ParamSpec, plan, rank_costs
from freehold.rules import cost as cost_module


def fake_seconds(num_rows: int, num_cols: int, num_matrices: int) -> float:
    return num_matrices * (1e-3 if num_rows == num_cols else 5e-3)


@pytest.fixture(name="model")
def _model(monkeypatch: pytest.MonkeyPatch) -> CostModel:
    monkeypatch.setattr(CostModel, "_measure", lambda _, *shape: fake_seconds(*shape))
    return CostModel.measured("cpu")


def test_each_shape_and_batch_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, ...]] = []
    monkeypatch.setattr(CostModel, "_measure", lambda _, *shape: measured.append(shape) or 8.0)
    model = CostModel.measured()
    assert model.seconds(4, 8, 3) == model.seconds(4, 8, 3) == 8.0
    assert model.seconds(4, 8, 80) == 80.0
    assert model.seconds(4, 8, 8) == 8.0
    assert measured == [(4, 8, 3), (4, 8, 8)]


def test_the_planner_balances_what_was_measured(model: CostModel) -> None:
    # by flops a wide matrix costs twice a square one, as measured five times
    params = [ParamSpec(name=f"square{i}", shape=(32, 32)) for i in range(5)] + [ParamSpec(name="wide", shape=(32, 64))]
    costs = model.table(params)
    assert costs == {(32, 32): 1_000_000, (32, 64): 5_000_000}
    layout = plan(params, num_ranks=2, policy="ns_cost", costs=costs)
    counted = plan(params, num_ranks=2, policy="ns_cost")
    assert max(rank_costs(layout, costs)) < max(rank_costs(counted, costs))
    assert layout.problems() == []


def test_a_table_that_lacks_a_shape_is_refused(model: CostModel) -> None:
    params = [ParamSpec(name="w", shape=(4, 8))]
    for costs in ({}, {(4, 8): 0}, {(4, 8): 1.5}):
        with pytest.raises(PlanError, match=r"costs must hold a positive int for matrices \(4, 8\) \(param 'w'\)"):
            plan(params, num_ranks=2, costs=costs)  # type: ignore[arg-type]


def test_stacks_tied_and_elementwise_params_count_as_they_are_updated(model: CostModel) -> None:
    params = [
        ParamSpec(name="stack", shape=(4, 16, 16)),
        ParamSpec(name="tied", shape=(4, 16, 16), tied_to="stack"),
        ParamSpec(name="norm", shape=(16,), rule="elementwise"),
    ]
    assert model.table(params, num_ranks=2) == {(16, 16): 1_000_000}
    assert list(model._seconds) == [(16, 16, 2)]


def test_a_prediction_scaled_down_is_near_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CostModel.measured("cpu", torch.float32).seconds(640, 640)
    monkeypatch.setattr(cost_module, "_MAX_RUN_S", 1e-9)
    scaled = CostModel.measured("cpu", torch.float32).seconds(640, 640)
    assert 0.3 < scaled / whole < 3.0


def test_a_model_can_be_sent_to_other_ranks(model: CostModel) -> None:
    model = CostModel.measured("cpu", torch.float32, method="gram", coefficients=((1.5, -0.5, 0.0),) * 2, num_steps=4)
    model.seconds(8, 8, 2)
    other = CostModel.from_json(model.to_json())
    assert other == model


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"device": "cpu"}', '{"device": "nowhere", "dtype": null}'])
def test_other_text_is_no_cost_model(text: str) -> None:
    with pytest.raises(RuleError, match=r"CostModel\.from_json takes what to_json wrote"):
        CostModel.from_json(text)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(RuleError, match="got 'polar'"):
        CostModel.measured(method="polar")
