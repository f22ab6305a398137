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
    state_of,
    weights,
    wrap,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler

from freehold import AdamW, Group, LayerwiseOptimizer, Muon
from freehold.errors import RoutingError, UnsupportedError
from freehold.runtime.setup import Options, draw_up


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
    for function in (opt.state_dict, lambda: opt.load_state_dict({})):  # one rank's part must not pass for the whole
        error = error_of(function)
        assert error is not None
        assert error[0] == "UnsupportedError"
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
    """state_dict() of the optimizer is refused for now; groups are read live, so no copy can go stale."""
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


class MixedDtypes(nn.Module):
    """A bf16 Linear, an fp32 router and an fp32 norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(18)
        self.up = nn.Linear(8, 8).bfloat16()
        self.router = nn.Linear(8, 4, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.norm(self.up(x.bfloat16()).float()))


def _mixed() -> None:
    rank = dist.get_rank()
    model = MixedDtypes()
    twin = copy.deepcopy(model)
    opt = wrap(model, bucket_numel=None)
    assert len(opt.param_groups) == 2  # dtypes share groups, not buffers
    for bucket in opt._buckets:
        dtypes = {p.param.dtype for p in bucket.params}
        assert dtypes == {bucket.memory.weights.dtype}
        assert bucket.memory.grads.dtype == bucket.memory.master.dtype == torch.float32
        one_copy = bucket.memory.master.data_ptr() == bucket.memory.own_weights.data_ptr()
        if bucket.owned:  # fp32 params are their own masters
            assert one_copy == (bucket.memory.weights.dtype == torch.float32)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)  # wrapped bit by bit
    for step in range(3):
        model(data(800 + 2 * step + rank, 4, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        assert_ranks_agree(model)
    for bucket in opt._buckets:
        if bucket.master_is_copy:
            assert torch.equal(bucket.memory.own_weights, bucket.memory.master.bfloat16())


def test_b29_every_dtype_has_buffers_of_its_own() -> None:
    run_ranks(2, _mixed)


class Pair(nn.Module):
    """Two equal shapes, declared in either order."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.zeros(8, 8)))


def _by_name(names: tuple[str, str]) -> dict[str, Tensor | None]:
    model = Pair(names)
    opt = wrap(model)
    (model.p1.mul(data(1, 8, 8)).sum() + model.p2.mul(data(2, 8, 8)).sum()).backward()
    opt.step()
    opt.synchronize()
    found = {f"{n} {f}": state_of(opt, n, f) for n in ("p1", "p2") for f in ("momentum_buffer", "master")}
    return {key: t for rank in everywhere(found) for key, t in rank.items() if t is not None}


def _order() -> None:
    first, second = _by_name(("p1", "p2")), _by_name(("p2", "p1"))
    for key in ("p1 momentum_buffer", "p2 momentum_buffer", "p1 master", "p2 master"):
        assert first[key] is not None
        assert torch.equal(first[key], second[key]), key
    assert not torch.equal(first["p1 master"], first["p2 master"])


def test_b29_state_follows_the_name_not_the_position() -> None:
    run_ranks(2, _order)


def test_b33_sizes_past_2_to_the_31_are_exact_and_cost_no_memory_to_plan() -> None:
    one = torch.empty(1, dtype=torch.bfloat16)
    shapes = [(46341, 46341)] + [(8192, 8192)] * 100
    params = [(f"w{i}", nn.Parameter(one.expand(shape))) for i, shape in enumerate(shapes)]
    options = Options(
        rules={"matrix": Muon()},
        groups=(),
        bucket_numel=None,
        policy="ns_cost",
        reduce_dtype=torch.float32,
        on_nonfinite="raise",
        overlap=True,
    )
    layout = draw_up(params, options, 8).layout
    assert layout.problems() == []
    assert layout.slots_of("w0")[0].numel == 46341**2 == 2_147_488_281
    assert layout.numel > 2**31
    assert all(type(slot.offset) is int for bucket in layout.buckets for slot in bucket.slots)


@pytest.mark.parametrize("bucket_numel", [0, -1, True, 1.5, "huge"])
def test_b34_a_bucket_size_that_is_none_is_refused(bucket_numel: Any) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises((ValueError, TypeError), match="bucket_numel"):
        wrap(model, bucket_numel=bucket_numel)
    wrap(model).close()  # nothing was left behind


def _odd_ranks(bucket_numel: int | None) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    model = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in [(8, 8)] * 5 + [(100, 3), (1, 1)]])
    opt = LayerwiseOptimizer(model, matrix=Muon(), elementwise=None, bucket_numel=bucket_numel)
    for bucket in opt._buckets:
        assert bucket.memory.weights.numel() == num_ranks * bucket.bucket.shard_numel
    if bucket_numel is None or bucket_numel > 1000:
        assert len(opt._buckets) == 1
    sum((p * (rank + 1)).sum() for p in model).backward()
    found = reduced(opt)
    for name, grad in found.items():
        assert torch.equal(grad, torch.full_like(grad, (num_ranks + 1) / 2)), name
    opt.step()
    assert len(set(everywhere(opt.layout.fingerprint()))) == 1
    assert_ranks_agree(model)


@pytest.mark.parametrize("bucket_numel", [None, 1, 10**12])
def test_b34_odd_numbers_of_ranks_and_extreme_bucket_sizes_train(bucket_numel: int | None) -> None:
    run_ranks(3, _odd_ranks, bucket_numel)
