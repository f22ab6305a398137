"""Reported cases about dtypes, names and sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    assert_ranks_agree,
    data,
    everywhere,
    reduced,
    state_of,
    wrap,
)
from ranks import run_ranks
from torch import Tensor, nn

from freehold import LayerwiseOptimizer, Muon
from freehold.runtime.setup import Options, draw_up


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
        assert bucket.grads.dtype == bucket.memory.master.dtype == torch.float32
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


def test_b29_sets_and_duplicate_names_are_refused() -> None:
    named = [("p1", nn.Parameter(torch.zeros(8, 8))), ("p2", nn.Parameter(torch.zeros(8, 8)))]
    for unordered in (set(named), frozenset(named), {p for _, p in named}):
        with pytest.raises(TypeError, match="a set"):
            wrap(unordered)
    with pytest.raises(ValueError, match="'p1' given 2 times"):
        wrap([named[0], ("p1", named[1][1])])
    with pytest.raises(ValueError, match="one Parameter given as 'p1' and 'p3'"):
        wrap([*named, ("p3", named[0][1])])


@pytest.mark.parametrize("policy", ["ns_cost", "packed"])
def test_b33_sizes_past_2_to_the_31_are_exact_and_cost_no_memory_to_plan(policy: str) -> None:
    one = torch.empty(1, dtype=torch.bfloat16)
    shapes = [(46341, 46341)] + [(8192, 8192)] * 100
    params = [(f"w{i}", nn.Parameter(one.expand(shape))) for i, shape in enumerate(shapes)]
    options = Options(
        rules={"matrix": Muon()},
        groups=(),
        bucket_numel=None,
        policy=policy,
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
