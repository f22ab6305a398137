"""Bad input: a clear error on all ranks before any training collective, whichever rank gave it; nobody hangs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PlainSGD, assert_ranks_agree, assert_same, data, error_of, everywhere, snapshot, weights, wrap
from ranks import run_ranks
from torch import nn

from freehold import AdamW, Group, LayerwiseOptimizer, Muon
from freehold.errors import (
    FreeholdError,
    LifecycleError,
    PlanError,
    PlanTypeError,
    RoutingError,
    UnsupportedError,
)


def _net() -> nn.Sequential:
    torch.manual_seed(22)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


class _Unruly(nn.Module):
    """A user's method that raises what no one expects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def get_output_embeddings(self) -> nn.Module:
        raise AttributeError("no head here")


def _broken_policy(problem: Any) -> Any:
    return {}["not there"]


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(8, 8)


def _sparse() -> list[tuple[str, nn.Parameter]]:
    return [("s", nn.Parameter(torch.eye(4).to_sparse()))]


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))


# name -> (what makes the optimizer, error, a part of its text). Called with a sound model.
_BAD: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "policy": (lambda m: wrap(m, policy="best"), PlanError, "'best'"),
    "policy type": (lambda m: wrap(m, policy=3), FreeholdError, "policy"),
    "policy raises": (lambda m: wrap(m, policy=_broken_policy), FreeholdError, "not there"),
    "bucket 0": (lambda m: wrap(m, bucket_numel=0), PlanError, "bucket_numel"),
    "bucket -1": (lambda m: wrap(m, bucket_numel=-1), PlanError, "bucket_numel"),
    "bucket True": (lambda m: wrap(m, bucket_numel=True), PlanTypeError, "bucket_numel"),
    "bucket 1.5": (lambda m: wrap(m, bucket_numel=1.5), PlanTypeError, "bucket_numel"),
    "bucket word": (lambda m: wrap(m, bucket_numel="large"), FreeholdError, "large"),
    "duplicate": (lambda m: wrap(2 * list(m.named_parameters())), RoutingError, "duplicate"),
    "foreign": (lambda m: wrap([*m.named_parameters(), ("t", torch.ones(2, 2))]), PlanTypeError, "'t'"),
    "set": (lambda m: wrap(set(m.parameters())), PlanTypeError, "a set"),
    "set of pairs": (lambda m: wrap(frozenset(m.named_parameters())), PlanTypeError, "a set"),
    "bare params": (lambda m: wrap(m.parameters()), PlanTypeError, "bare params"),
    "list of params": (lambda m: wrap(list(m.parameters())), PlanTypeError, "bare params"),
    "one tensor": (lambda m: wrap(m[0].weight), PlanTypeError, "Parameter"),
    "torch groups": (lambda m: wrap([{"params": list(m.parameters())}]), PlanTypeError, "dict at position 0"),
    "a number": (lambda m: wrap(5), PlanTypeError, "int"),
    "nothing": (lambda m: wrap(None), PlanTypeError, "NoneType"),
    "empty": (lambda m: wrap([]), RoutingError, "nothing to train"),
    "all frozen": (lambda m: wrap(m.requires_grad_(False)), RoutingError, "nothing to train"),
    "meta": (lambda m: wrap(_meta()), UnsupportedError, "meta"),
    "complex": (lambda m: wrap(_Complex()), UnsupportedError, "complex64"),
    "sparse": (lambda m: wrap(_sparse()), UnsupportedError, "sparse"),
    "wrong kind": (lambda m: wrap(m, matrix=AdamW()), RoutingError, "kind 'elementwise'"),
    "rules swapped": (lambda m: wrap(m, matrix=AdamW(), elementwise=Muon()), RoutingError, "kind"),
    "torch.optim.Muon": (lambda m: wrap(m, matrix=torch.optim.Muon([m[0].weight])), PlanTypeError, "not rules"),
    "torch.optim.Muon class": (lambda m: wrap(m, matrix=torch.optim.Muon), PlanTypeError, "not rules"),
    "rule class": (lambda m: wrap(m, matrix=Muon), PlanTypeError, "freehold.Muon"),
    "no matrix rule": (lambda m: wrap(m, matrix=None), RoutingError, "'0.weight'"),
    "no elementwise rule": (lambda m: wrap(m, elementwise=None), RoutingError, "'0.bias'"),
    "no matrix": (lambda m: wrap(m[1]), RoutingError, "no param is a matrix"),
    "no rule": (lambda m: wrap(m, matrix=None, elementwise=None), RoutingError, "is None"),
    "groups dict": (lambda m: wrap(m, groups=[{"pattern": "*"}]), PlanTypeError, "dict"),
    "groups number": (lambda m: wrap(m, groups=5), PlanTypeError, "groups"),
    "group option": (lambda m: wrap(m, groups=[Group("*", lrr=1.0)]), RoutingError, "lrr"),
    "group value": (lambda m: wrap(m, groups=[Group("*", lr=-1.0)]), FreeholdError, "-1.0"),
    "group nothing": (lambda m: wrap(m, groups=[Group("zzz")]), RoutingError, "zzz"),
    "group vector": (lambda m: wrap(m, groups=[Group("*.bias", rule="matrix")]), RoutingError, "no matrix"),
    "reduce_dtype": (lambda m: wrap(m, reduce_dtype=torch.int32), PlanTypeError, "reduce_dtype"),
    "reduce_dtype word": (lambda m: wrap(m, reduce_dtype="fp32"), PlanTypeError, "reduce_dtype"),
    "overlap": (lambda m: wrap(m, overlap=1), PlanTypeError, "overlap"),
    "on_nonfinite": (lambda m: wrap(m, on_nonfinite="ignore"), PlanError, "on_nonfinite"),
    "unruly model": (lambda m: wrap(_Unruly()), FreeholdError, "no head here"),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_input_is_a_clear_error_of_the_right_type(name: str) -> None:
    make, kind, text = _BAD[name]
    model = _net()
    with pytest.raises(kind) as caught:
        make(model)
    assert isinstance(caught.value, (ValueError, TypeError, RuntimeError))
    assert text in str(caught.value)
    assert not model[0].weight._backward_hooks
    wrap(_net()).close()


def _refused_everywhere(names: list[str], bad_ranks: tuple[int, ...]) -> list[tuple[str, str, str]]:
    """Make each bad call on some ranks and a good one on the others; collect what differs from the promise."""
    rank, faults = dist.get_rank(), []
    for name in names:
        model = _net()
        make = _BAD[name][0] if rank in bad_ranks else wrap
        errors = everywhere(error_of(lambda make=make, model=model: make(model)))
        told = all(f"rank {r}" in errors[0][1] for r in bad_ranks) if errors[0] else False
        if len(set(errors)) != 1 or (len(bad_ranks) == 1 and not told):
            faults.append((name, *map(str, errors)))
        hooked = [p for p in model.parameters() if p._backward_hooks]
        assert not hooked, name
    opt = wrap(_net())  # the group still works
    assert_ranks_agree(nn.ModuleList([nn.ParameterList(p.param for p in opt._params)]))
    return faults


@pytest.mark.parametrize("bad_ranks", [(0,), (1,), (0, 1)])
def test_what_one_rank_refuses_all_refuse_and_the_error_names_it(bad_ranks: tuple[int, ...]) -> None:
    assert run_ranks(2, _refused_everywhere, list(_BAD), bad_ranks) == [[], []]


def _differing_models() -> None:
    rank = dist.get_rank()
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(8, 8 + rank), nn.LayerNorm(8 + rank))
    renamed = nn.ModuleDict({f"layer{rank}": nn.Linear(8, 8)})
    dtypes = nn.Linear(8, 8).to(torch.bfloat16 if rank else torch.float32)
    frozen = _net()
    frozen[0].weight.requires_grad_(rank == 0)
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if rank:
        tied[1].weight = tied[0].weight
    deeper = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2 + rank)])
    for model in (wide, renamed, dtypes, frozen, tied, deeper):
        errors = everywhere(error_of(lambda model=model: wrap(model)))
        assert errors[0] == errors[1]
        assert errors[0] is not None
        assert errors[0][0] == "ConsistencyError"
        assert "layout fingerprint" in errors[0][1]


def _differing_arguments() -> None:
    rank = dist.get_rank()
    pairs: dict[str, dict[str, Any]] = {
        "param groups": {"matrix": Muon(lr=0.1 + rank)},
        "layout fingerprint": {"bucket_numel": 100 + 400 * rank},
        "reduce_dtype": {"reduce_dtype": torch.float32 if rank else torch.bfloat16},
        "overlap": {"overlap": bool(rank)},
        "on_nonfinite": {"on_nonfinite": "skip" if rank else "raise"},
        "param group of each param": {"groups": [Group(f"{2 * rank}.*")]},
    }
    for name, options in pairs.items():
        errors = everywhere(error_of(lambda options=options: wrap(_net(), **options)))
        assert errors[0] == errors[1], name
        assert errors[0] is not None, name
        assert errors[0][0] == "ConsistencyError"
        assert name in errors[0][1]
        assert "ranks [0]" in errors[0][1]


@pytest.mark.parametrize("function", [_differing_models, _differing_arguments])
def test_models_or_arguments_that_differ_are_refused_on_all_ranks(function: Any) -> None:
    run_ranks(2, function)


def _second_on_one_rank() -> None:
    rank, model, other = dist.get_rank(), _net(), _net()
    opt = wrap(model)
    errors = everywhere(error_of(lambda: wrap(model if rank else other)))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "LifecycleError"
    assert "rank 1: '0.weight'" in errors[0][1]
    model(data(rank, 3, 8)).sum().backward()
    opt.step()
    assert_ranks_agree(model)


def test_a_second_optimizer_on_one_rank_is_refused_on_all() -> None:
    run_ranks(2, _second_on_one_rank)


def _not_a_member() -> None:
    rank = dist.get_rank()
    group = dist.new_group([1])
    model = _net()
    if rank == 0:
        error = error_of(lambda: wrap(model, process_group=group))
        assert error is not None
        assert error[0] == "LifecycleError"
        assert "not in process_group" in error[1]
    else:
        opt = wrap(model, process_group=group)
        model(data(1, 3, 8)).sum().backward()
        opt.step()
        opt.close()
    dist.barrier()


def test_a_rank_outside_the_group_raises_alone() -> None:
    run_ranks(2, _not_a_member)


def test_process_group_of_the_wrong_type() -> None:
    for wrong in ("gloo", 3, object()):
        with pytest.raises(PlanTypeError, match="process_group must be a ProcessGroup"):
            wrap(_net(), process_group=wrong)


def test_torchrun_without_init_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LifecycleError, match="init_process_group"):
        wrap(_net())
    monkeypatch.setenv("WORLD_SIZE", "1")
    wrap(_net()).close()


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
    assert errors[0][0] == "UnsupportedError"
    assert "GradScaler" in errors[0][1]
    opt.zero_grad()
    assert_same(snapshot(opt), before)


@pytest.mark.parametrize("in_float16", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_is_refused_by_name(unscale_first: bool, in_float16: bool) -> None:
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
    rank, model = dist.get_rank(), _net()
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
        return float(loss)

    errors = everywhere(error_of(lambda: opt.step(lambda: closure(rank == 1))))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "ConsistencyError"
    assert "rank 1: 'the data loader is empty'" in errors[0][1]
    assert "KeyError" in errors[0][1]
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


@pytest.mark.parametrize(("when", "then"), [("before", "zero_grad"), ("in", "step"), ("after", "close"), ("before", "close")])
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
    for call in (opt.state_dict, lambda: opt.load_state_dict({})):
        with pytest.raises(UnsupportedError, match="not supported yet"):
            call()
    opt.close()


def _warnings_as_errors_on_one_rank() -> None:
    """The routing may warn of an ambiguous head; where that is an error on one rank, all must learn of it."""

    class Ambiguous(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(8, 8)
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 1 else "ignore")
        errors = everywhere(error_of(lambda: wrap(Ambiguous())))
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert "rank 1" in errors[0][1]


def test_a_warning_that_one_rank_turns_into_an_error() -> None:
    run_ranks(2, _warnings_as_errors_on_one_rank)


def test_a_rule_of_another_library_for_one_group_needs_its_rule() -> None:
    with pytest.raises(RoutingError, match="is None"):
        LayerwiseOptimizer(_net(), matrix=Muon(), elementwise=None, groups=[Group("*.bias", lr=0.1)])
    opt = LayerwiseOptimizer(
        _net(), matrix=None, elementwise=PlainSGD(lr=0.1), groups=[Group("*", rule="elementwise", lr=0.2)]
    )
    assert {g["lr"] for g in opt.param_groups if g["params"]} == {0.2}
    opt.close()
