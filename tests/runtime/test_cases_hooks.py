"""Reported cases about hooks: accumulation windows, stale weights, aliased buffers, modules used twice."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    assert_ranks_agree,
    assert_same,
    data,
    error_of,
    everywhere,
    launches,
    local_grads,
    mean_over_ranks,
    padding_is_zero,
    poison_grads,
    reduced,
    weights,
    wrap,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that all of PyTorch uses
from torch.utils.checkpoint import checkpoint

from freehold import LayerwiseOptimizer


def _three(size: int = 16) -> nn.Sequential:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size))


def _poison_transport(opt: LayerwiseOptimizer) -> None:
    """What no rank may read is NaN: others' weight shards until they come, their gradient shards once reduced."""
    all_gather, finish = opt._comm.all_gather, opt._reducer._finish_oldest

    def poisoned_gather(flat: Tensor, bucket: int) -> Any:
        plan = opt.layout.buckets[bucket]
        for slot in plan.slots:
            if slot.rank != opt._comm.rank:
                start = slot.rank * plan.shard_numel + slot.offset
                flat[start : start + slot.numel].fill_(float("nan"))
        return all_gather(flat, bucket)

    def finish_and_poison() -> None:
        finish()
        for b in opt._buckets:
            if b.grad_phase.name == "REDUCED":
                for slot in b.bucket.slots:
                    if slot.rank != opt._comm.rank:
                        start = slot.rank * b.bucket.shard_numel + slot.offset
                        b.grads.flat[start : start + slot.numel].fill_(float("nan"))

    opt._comm.all_gather = poisoned_gather
    opt._reducer._finish_oldest = finish_and_poison


def _poisoned(num_micro: int, dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    model = _three().to(dtype)
    off, poisoned = copy.deepcopy(model), copy.deepcopy(model)
    pairs = [(model, wrap(model)), (off, wrap(off, overlap=False)), (poisoned, wrap(poisoned))]
    opt = pairs[2][1]
    _poison_transport(opt)
    for step in range(4):
        poison_grads(opt)  # the window begins: nothing that lies in the buffers may count
        for each, optimizer in pairs:
            for micro in range(num_micro):
                x = data(90 + 8 * step + 2 * micro + rank, 5, 16, dtype=dtype)
                with contextlib.nullcontext() if micro == num_micro - 1 else optimizer.no_sync():
                    each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        poison_grads(opt)
        opt.synchronize()
        once = weights(poisoned)
        opt.synchronize()
        assert_same(weights(poisoned), once, "the second synchronize() of step {step}:")
        for each, _ in pairs[1:]:
            assert_same(weights(each), weights(model), f"step {step}:")
        assert_ranks_agree(poisoned)
    poison_grads(opt)
    poisoned(data(1, 2, 16, dtype=dtype)).sum().backward()
    opt.clip_grad_norm_(1.0)
    assert padding_is_zero(opt)


@pytest.mark.parametrize(("num_micro", "dtype"), [(1, torch.float32), (2, torch.float32), (2, torch.bfloat16)])
def test_b04_no_rank_reads_what_a_buffer_held_before(num_micro: int, dtype: torch.dtype) -> None:
    """Buffers are overwritten, not cleared: all may be NaN beforehand. Stronger than "all zero at the start"."""
    run_ranks(2, _poisoned, num_micro, dtype)


def _windows(overlap: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    rank = dist.get_rank()
    model = _three(8).to(dtype)
    opt = wrap(model, overlap=overlap, bucket_numel=1)
    num_buckets = len(opt._buckets)
    for window, length in enumerate((2, 1, 3)):
        opt._log.clear()
        expected: dict[str, Tensor] = {}
        plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).to(dtype)
        plain.load_state_dict(model.state_dict())
        for micro in range(length):
            x = data(200 + 10 * window + 2 * micro + rank, 4, 8, dtype=dtype)
            mean = mean_over_ranks(local_grads(plain, plain(x).square().mean()))
            for name, grad in mean.items():
                assert grad is not None
                expected[name] = expected.get(name, 0) + grad.float()
            with contextlib.nullcontext() if micro == length - 1 else opt.no_sync():
                model(x).square().mean().backward()
        found = reduced(opt)
        assert launches(opt) == list(range(num_buckets)), "each bucket once per window"
        for name, grad in expected.items():
            tolerance = 1e-6 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(found[name], grad.flatten(), rtol=tolerance, atol=tolerance / 10)
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    result = weights(model)
    opt.close()
    return result


def _windows_on_and_off(dtype: torch.dtype) -> None:
    assert_same(_windows(True, dtype), _windows(False, dtype), "overlap on against off:")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b09_windows_of_any_length_are_reduced_once_and_whole(dtype: torch.dtype) -> None:
    run_ranks(2, _windows_on_and_off, dtype)


def _two_backwards() -> None:
    """No no_sync(): the second backward comes after the reduction, before step(). The choice: the correct sum."""
    rank = dist.get_rank()
    for overlap in (True, False):
        model = _three(8)
        plain = copy.deepcopy(model)
        opt = wrap(model, overlap=overlap, bucket_numel=1)
        total: dict[str, Tensor] = {}
        for micro in range(3):
            x = data(300 + 2 * micro + rank, 4, 8)
            mean = mean_over_ranks(local_grads(plain, plain(x).square().mean()))
            total = {n: total.get(n, 0) + g for n, g in mean.items() if g is not None}
            model(x).square().mean().backward()
        found = reduced(opt)
        for name, grad in total.items():
            torch.testing.assert_close(found[name], grad.flatten(), rtol=1e-6, atol=1e-8)
        opt.close()


def test_b09_a_second_backward_after_the_reduction_adds() -> None:
    run_ranks(2, _two_backwards)


class OutOfOrder(nn.Module):
    """Defined A, B, C, D; runs A, C, B; reads D's weight outside D.forward; may leave C out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.A, self.B, self.C, self.D = (nn.Linear(8, 8) for _ in range(4))
        self.table = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor, skip_c: bool = False) -> Tensor:
        h = torch.tanh(self.A(x)) + self.table[: x.shape[0]]
        h = h if skip_c else torch.tanh(self.C(h))
        return F.linear(torch.tanh(self.B(h)), self.D.weight) + self.D.bias


def _each_read(opt: LayerwiseOptimizer, model: nn.Module, x: Tensor) -> Callable[[], Any]:
    """A read right after step(), different at every step; what it returns is compared with overlap off."""
    named = dict(model.named_parameters())
    reads = (
        lambda: {n: t.clone() for n, t in model.state_dict().items()},
        lambda: torch.stack([p.norm() for p in named.values()]),
        lambda: model.eval()(x).detach(),
        lambda: copy.deepcopy(model).state_dict(),
        lambda: nn.utils.parameters_to_vector(named.values()).detach(),
        lambda: torch._foreach_norm(list(named.values())),
        lambda: F.linear(x, named["B.weight"]).detach(),
        lambda: [p.tolist() for p in named.values()],
        lambda: [p.detach().numpy().copy() for p in named.values()],
        lambda: named["C.weight"].data.clone(),
        lambda: named["table"][3, 2].item(),
    )
    return reads[opt._params[0].num_steps % len(reads)]


def _stale() -> None:
    rank = dist.get_rank()
    model = OutOfOrder()
    plain = copy.deepcopy(model)
    opt, off = wrap(model, bucket_numel=1), wrap(plain, bucket_numel=1, overlap=False)
    assert (opt._overlaps, off._overlaps) == (True, False)  # one switch, read from one place
    for step in range(12):
        seen = []
        for each, optimizer in ((model, opt), (plain, off)):
            x = data(400 + 2 * step + rank, 5, 8)
            each.train()
            each(x, skip_c=step % 3 == 1).square().mean().backward()
            optimizer.step()  # with step() of the next round waiting for gathers that nobody read
            if step % 4 != 3:
                seen.append(_each_read(optimizer, each, x)())
            optimizer.zero_grad()
        if seen:
            torch.testing.assert_close(_tensors_of(seen[0]), _tensors_of(seen[1]), rtol=0, atol=0)
    assert_same(weights(model), weights(plain))
    assert_ranks_agree(model)


def _tensors_of(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def test_b16_every_read_after_step_sees_current_weights() -> None:
    run_ranks(2, _stale)


def _two_steps_without_reading() -> None:
    """step() waits for gathers in flight: gradients set by hand, no forward in between."""
    model = _three(8)
    plain = copy.deepcopy(model)
    opt, off = wrap(model, bucket_numel=1), wrap(plain, bucket_numel=1, overlap=False)
    for step in range(4):
        for each, optimizer in ((model, opt), (plain, off)):
            for index, p in enumerate(each.parameters()):
                p.grad = data(500 + 10 * step + index, *p.shape)
            optimizer.step()
    assert_same(weights(model), weights(plain))


def test_b16_a_step_waits_for_the_gathers_of_the_step_before() -> None:
    run_ranks(2, _two_steps_without_reading)


class Reused(nn.Module):
    """One layer twice, in one of four ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.first, self.L, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.how == "plain":
            h = self.L(self.L(h))
        else:
            reentrant = self.how == "reentrant"
            inner = checkpoint(self.L, h, use_reentrant=reentrant)
            h = checkpoint(self.L, inner, use_reentrant=reentrant)
        return self.last(h)


def _reused(how: str, bucket_numel: int | None) -> str | None:
    rank = dist.get_rank()
    model = Reused(how)
    reference = Reused("plain")
    opt = wrap(model, bucket_numel=bucket_numel)
    x = data(600 + rank, 3, 4)
    mean = mean_over_ranks(local_grads(reference, reference(x).square().sum()))
    error = error_of(lambda: model(x).square().sum().backward())
    seen = everywhere(error)
    assert seen[0] == seen[1]
    if error is not None:
        assert how == "reentrant"
        assert error[0] == "UnsupportedError"
        assert "'L." in error[1]
        assert "use_reentrant=False" in error[1]
        opt.zero_grad()  # and life goes on
        model.how = "plain"
        model(x).square().sum().backward()
    found = reduced(opt)
    for name, grad in mean.items():
        assert grad is not None
        torch.testing.assert_close(found[name], grad.flatten(), rtol=1e-6, atol=1e-7)
    opt.step()
    opt.zero_grad()
    assert_ranks_agree(model)
    return None if error is None else error[0]


@pytest.mark.parametrize("how", ["plain", "non-reentrant"])
def test_b22_a_module_used_twice_has_the_gradient_of_one_process(how: str) -> None:
    assert run_ranks(2, _reused, how, 1) == [None, None]


def test_b22_reentrant_checkpointing_of_a_module_used_twice_is_right_or_refused() -> None:
    """The choice made: the sum where the bucket has not been sent yet, else an error that names the param."""
    assert run_ranks(2, _reused, "reentrant", None) == [None, None]
    assert run_ranks(2, _reused, "reentrant", 1) == ["UnsupportedError", "UnsupportedError"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(14)
        self.embedding = nn.Embedding(16, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, how: str = "plain") -> Tensor:
        h = self.embedding(tokens)
        h = self.middle(h) if how == "plain" else checkpoint(self.middle, h, use_reentrant=how == "reentrant")
        return self.head(h)


def _tied(how: str) -> None:
    rank = dist.get_rank()
    model = Tied()
    plain = copy.deepcopy(model)
    opt = wrap(model, bucket_numel=1)
    tokens = torch.randint(16, (3, 5), generator=torch.Generator().manual_seed(rank))
    mean = mean_over_ranks(local_grads(plain, plain(tokens).square().sum()))
    for _ in range(2):
        model(tokens, how).square().sum().backward()
        found = reduced(opt)
        for name, grad in mean.items():
            assert grad is not None
            torch.testing.assert_close(found[name], grad.flatten(), rtol=1e-6, atol=1e-6)
        opt.zero_grad()
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("how", ["plain", "reentrant", "non-reentrant"])
def test_b22_a_tied_weight_gets_the_sum_of_both_uses(how: str) -> None:
    run_ranks(2, _tied, how)
