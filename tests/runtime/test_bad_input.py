"""Bad input: a clear error on all ranks before any training collective, whichever rank gave it; nobody hangs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PlainSGD, assert_ranks_agree, data, error_of, everywhere, wrap
from ranks import run_ranks
from torch import nn

from freehold import AdamW, Group, LayerwiseOptimizer, Muon, NorMuon
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
    "on_nonfinite": (lambda m: wrap(m, on_nonfinite="forgive"), PlanError, "on_nonfinite"),
    "grad_memory": (lambda m: wrap(m, grad_memory="half"), PlanError, "grad_memory"),
    "early_update": (lambda m: wrap(m, early_update=True), PlanError, "on_nonfinite='ignore'"),
    "costs": (lambda m: wrap(m, costs={}), PlanError, "costs must hold"),
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
    assert not model[0].weight._post_accumulate_grad_hooks
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
        hooked = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
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
        "rules": {"matrix": NorMuon() if rank else Muon()},
        "reduce_dtype": {"reduce_dtype": torch.float32 if rank else torch.bfloat16},
        "overlap": {"overlap": bool(rank)},
        "on_nonfinite": {"on_nonfinite": "skip" if rank else "raise"},
        "grad_memory": {"grad_memory": "sharded" if rank else "full"},
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
