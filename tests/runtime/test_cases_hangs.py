"""Reported cases in which ranks parted: one skipped what the others were already waiting in."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    TorchPair,
    assert_ranks_agree,
    assert_same,
    data,
    error_of,
    everywhere,
    launches,
    mean_over_ranks,
    reduced,
    snapshot,
    weights,
    wrap,
)
from ranks import run_ranks
from torch import nn

from freehold import AdamW, LayerwiseOptimizer, Muon


class TwoExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e0, self.e1 = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)


def _experts(quiet_rank: int | None) -> None:
    """Rank r uses expert r alone; ``quiet_rank`` uses none and does not even call backward."""
    rank, model = dist.get_rank(), TwoExperts()
    reference = copy.deepcopy(model)
    opt = LayerwiseOptimizer(model, matrix=Muon(lr=0.02), elementwise=None, bucket_numel=1)
    pair = TorchPair(reference, lr=0.02, weight_decay=0.1)
    inputs = [data(10, 4, 8), data(11, 4, 8)]
    for _ in range(3):
        if rank != quiet_rank:
            getattr(model, f"e{rank}")(inputs[rank]).square().sum().backward()
        losses = [getattr(reference, f"e{r}")(inputs[r]).square().sum() for r in range(2) if r != quiet_rank]
        (sum(losses) / 2).backward()
        found = reduced(opt)
        for name, p in reference.named_parameters():
            if p.grad is None:
                assert not found[name].any()
            else:  # the other rank counts as zero: exactly half of this one's gradient
                assert torch.equal(found[name], p.grad.flatten()), name
        opt.step()
        opt.zero_grad()
        pair.step()
        pair.zero_grad()
        assert_same(weights(model), weights(reference))
        assert_ranks_agree(model)
    counters = everywhere([p.num_steps for p in opt._params])
    assert counters == [[3, 3 if quiet_rank is None else 0]] * 2
    opt.close()


def _many_buckets(idle: str) -> None:
    """More buckets than may be in flight: rank 0 waits in its backward for the part of a rank that has none."""
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(16)])
    for p in model.parameters():  # keeps gradients at a size at which torch's Muon, the reference, is accurate
        nn.init.orthogonal_(p)
    reference = copy.deepcopy(model)
    opt, pair = wrap(model, bucket_numel=1), TorchPair(reference)
    assert len(opt._buckets) > 6
    for step in range(2):
        backwards = {0: 3, 1: 0 if idle == "no backward" else 1}[rank]
        for micro in range(backwards):  # without no_sync(), unequally often
            model(data(micro, 2, 8)).square().sum().backward()
        for r in range(2):
            for micro in range({0: 3, 1: 0 if idle == "no backward" else 1}[r]):
                (reference(data(micro, 2, 8)).square().sum() / 2).backward()
        found = reduced(opt)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(found[name], p.grad.flatten(), rtol=1e-5, atol=1e-9)
            p.grad = found[name].view_as(p)
        opt.step()
        opt.zero_grad()
        pair.step()
        pair.zero_grad()
        assert_same(weights(model), weights(reference), f"step {step}:")
    assert_ranks_agree(model)


@pytest.mark.parametrize("idle", ["no backward", "fewer backwards"])
def test_b01_a_rank_behind_the_others_stops_nobody_in_backward(idle: str) -> None:
    run_ranks(2, _many_buckets, idle)


@pytest.mark.parametrize("quiet_rank", [None, 1])
def test_b01_a_rank_without_a_gradient_neither_hangs_nor_skips(quiet_rank: int | None) -> None:
    run_ranks(2, _experts, quiet_rank)


def _nonfinite(mode: str, planted: float, reduce_dtype: torch.dtype, dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    clean = copy.deepcopy(model)
    opt = wrap(model, on_nonfinite=mode, reduce_dtype=reduce_dtype)
    reference = wrap(clean, reduce_dtype=reduce_dtype)
    owned_by_0 = next(n for n in ("0.weight", "1.weight") if opt.layout.owner(n) == 0)
    victim = dict(model.named_parameters())[owned_by_0]
    x = data(rank, 4, 8, dtype=dtype)
    for step in range(4):
        plants = step in (0, 2) and rank == 1
        handle = (
            victim.register_hook(lambda g: g.clone().index_fill_(0, torch.tensor([3]), planted)) if plants else None
        )
        if step in (0, 2):
            before = snapshot(opt)
            model(x).square().mean().backward()
            _refused_together(opt, mode, owned_by_0)
            assert_same(snapshot(opt), before, f"after the refused step {step}:")
            opt.zero_grad()
        else:
            for each, optimizer in ((model, opt), (clean, reference)):
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(snapshot(opt), snapshot(reference), f"after step {step}:")
        if handle is not None:
            handle.remove()
    assert everywhere(opt.num_skipped_steps) == ([2, 2] if mode == "skip" else [0, 0])
    assert_ranks_agree(model)


def _refused_together(opt: LayerwiseOptimizer, mode: str, name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = error_of(opt.step)
    seen = everywhere((error, [str(w.message) for w in caught]))
    assert seen[0] == seen[1]
    if mode == "skip":
        assert error is None
        assert len(caught) == 1
        assert repr(name) in str(caught[0].message)
    else:
        assert error is not None
        assert error[0] == "NonFiniteGradientError"
        assert repr(name) in error[1]


@pytest.mark.parametrize("mode", ["skip", "raise"])
@pytest.mark.parametrize(
    ("planted", "reduce_dtype", "dtype"),
    [
        (float("inf"), torch.float32, torch.float32),
        (float("nan"), torch.float32, torch.bfloat16),
        (float("-inf"), torch.bfloat16, torch.float16),
    ],
)
def test_b06_a_nonfinite_gradient_is_refused_on_all_ranks_and_leaves_no_trace(
    mode: str, planted: float, reduce_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Without a scaler: ``on_nonfinite="raise"`` (the default) is a RuntimeError, ``"skip"`` a counted warning."""
    run_ranks(2, _nonfinite, mode, planted, reduce_dtype, dtype)


class WithDead(nn.Module):
    """``dead`` and ``dead_norm`` are never called; ``sometimes`` only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.dead = nn.Linear(8, 8)
        self.dead_norm = nn.LayerNorm(8)
        self.sometimes = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.sometimes(h)) if use else h)


def _unused(using_ranks: tuple[int, ...], bucket_numel: int | None) -> None:
    rank = dist.get_rank()
    model = WithDead()
    reference = copy.deepcopy(model)
    opt = wrap(model, lr=0.1, adam_lr=0.1, weight_decay=0.1, bucket_numel=bucket_numel)
    pair = TorchPair(reference, lr=0.1, adam_lr=0.1, weight_decay=0.1)
    dead = {n: t for n, t in weights(model).items() if "dead" in n}
    for step in range(3):
        use = step == 0 and rank in using_ranks
        x = data(20 + 2 * step + rank, 6, 8)
        model(x, use).square().mean().backward()
        grads = torch.autograd.grad(reference(x, use).square().mean(), list(reference.parameters()), allow_unused=True)
        names = [n for n, _ in reference.named_parameters()]
        mean = mean_over_ranks(dict(zip(names, grads, strict=True)))
        for name, p in reference.named_parameters():
            p.grad = mean[name]
        opt.step()
        opt.zero_grad()
        pair.step()
        assert_same(weights(model), weights(reference), f"step {step}:")
    assert_same({n: t for n, t in weights(model).items() if "dead" in n}, dead)
    steps = {p.name: p.num_steps for p in opt._params}
    assert {n: s for n, s in steps.items() if "dead" in n} == dict.fromkeys(dead, 0)
    assert steps["sometimes.weight"] == (1 if using_ranks else 0)
    assert steps["first.bias"] == 3
    for bucket in opt._buckets:
        for slot in bucket.owned:
            if "dead" in slot.name:
                for tensor in bucket.memory.state.values():
                    assert not tensor[slot.offset : slot.offset + slot.numel].any(), slot.name
    assert_ranks_agree(model)


@pytest.mark.parametrize("bucket_numel", [1, None])
@pytest.mark.parametrize("using_ranks", [(), (1,), (0, 1)])
def test_b14_unused_on_all_ranks_is_untouched_and_used_on_one_is_used_on_all(
    using_ranks: tuple[int, ...], bucket_numel: int | None
) -> None:
    """The choice made: torch's semantics (a gradient of None), not those of zeros."""
    run_ranks(2, _unused, using_ranks, bucket_numel)


class UnusedBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def _unused_between() -> None:
    rank = dist.get_rank()
    model = UnusedBetween()
    plain = copy.deepcopy(model)
    opt = wrap(model, bucket_numel=1, overlap=True)
    off = wrap(plain, bucket_numel=1, overlap=False)
    assert len(opt._buckets) > 3
    for step in range(3):
        opt._log.clear()
        for each, optimizer in ((model, opt), (plain, off)):
            each(data(step * 2 + rank, 5, 8)).square().mean().backward()
            if optimizer is opt:  # the end of backward has launched what no hook could, in order
                assert launches(opt) == list(range(len(opt._buckets)))
            optimizer.step()
            optimizer.zero_grad()
        assert launches(opt) == list(range(len(opt._buckets)))
        assert_same(weights(model), weights(plain), f"step {step}:")
        assert_ranks_agree(model)


def test_b15_a_param_absent_from_forward_delays_its_bucket_to_the_end_of_backward_only() -> None:
    run_ranks(2, _unused_between)


def _edge_model(kind: str) -> nn.Module:
    if kind == "one matrix":
        return nn.Linear(8, 8, bias=False)
    if kind == "three elements":
        return nn.Linear(1, 3)
    if kind == "matrices":
        return nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False))
    return nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))


def _edge(kind: str) -> Any:
    """Step, clip and a scheduler on a model too small for its ranks; the reference gets the same averaged gradients."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(4)
    model = _edge_model(kind)
    if kind == "three elements":
        model.weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    has_matrix = any(p.ndim == 2 and p.requires_grad for p in model.parameters())
    has_rest = any(p.ndim == 1 for p in model.parameters())
    rules = {"matrix": Muon(lr=0.02) if has_matrix else None, "elementwise": AdamW(lr=0.01) if has_rest else None}
    opt = LayerwiseOptimizer(model, bucket_numel=None, **rules)
    torch_opt = [torch.optim.Muon(reference.parameters(), lr=0.02)] if has_matrix else []
    if has_rest:
        trainable = [p for p in reference.parameters() if p.requires_grad]
        torch_opt = [torch.optim.AdamW(trainable, lr=0.01, foreach=False)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.5**s) for o in (opt, *torch_opt)]
    for step in range(3):
        x = data(step * 7 + rank, 4, 1 if kind == "three elements" else 8)
        (model(x) * data(step, *model(x).shape)).sum().backward()
        norm = opt.clip_grad_norm_(0.5)
        if num_ranks == 1:
            (reference(x) * data(step, *model(x).shape)).sum().backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        else:
            pieces = everywhere([(n, s, g.clone()) for n, s, g in opt.reduced_grads()])
            assert len({float(n) for n in everywhere(norm)}) == 1
            for name, p in reference.named_parameters():
                parts = sorted(((s, g) for r in pieces for n, s, g in r if n == name), key=lambda part: part[0])
                if parts:
                    p.grad = torch.cat([g for _, g in parts]).view(p.shape)
        opt.step()
        opt.zero_grad()
        for o in torch_opt:
            o.step()
            o.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        assert_same(weights(model), weights(reference), f"{kind}, step {step}:")
    if num_ranks > 1:
        assert_ranks_agree(model)
    owned = [len(b.owned) for b in opt._buckets]
    numels = [b.bucket.numel for b in opt._buckets]
    opt.close()
    return owned, numels


@pytest.mark.parametrize("kind", ["one matrix", "three elements", "matrices", "norms"])
def test_b17_four_ranks_with_less_than_four_things_to_own(kind: str) -> None:
    results = run_ranks(4, _edge, kind)
    if kind == "one matrix":
        assert [owned for owned, _ in results].count([0]) == 3
        assert results[0][1] == [4 * 64]


@pytest.mark.parametrize("kind", ["one matrix", "three elements", "matrices", "norms"])
def test_b17_one_process_without_a_group_is_plain_muon_and_adamw(kind: str) -> None:
    _edge(kind)
