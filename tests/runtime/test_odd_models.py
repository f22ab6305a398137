"""Models, dtypes and training loops that no one planned for: still what one process would compute, and never a hang."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases import (
    TorchPair,
    assert_ranks_agree,
    assert_same,
    data,
    everywhere,
    launches,
    mean_over_ranks,
    padding_is_zero,
    reduced,
    weights,
    wrap,
)
from ranks import run_ranks
from torch import Tensor, nn

from freehold import AdamW, Group, LayerwiseOptimizer, Muon


class OddShapes(nn.Module):
    """Every shape and memory layout at once; the loss is linear in each param, so gradients are known."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(30)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.randn(1))
        self.one_by_one = nn.Parameter(torch.randn(1, 1))
        self.row = nn.Parameter(torch.randn(1, 7))
        self.column = nn.Parameter(torch.randn(13, 1))
        self.prime = nn.Parameter(torch.randn(17, 31))
        self.transposed = nn.Parameter(torch.randn(9, 5).t())
        self.strided = nn.Parameter(torch.randn(12, 20)[::2, ::2])
        self.stack = nn.Parameter(torch.randn(3, 5, 7).permute(0, 2, 1))
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.vector = nn.Parameter(torch.randn(101)[::2])
        self.to(dtype)

    def loss(self, seed: int) -> Tensor:
        terms = [(p * data(seed + i, *p.shape, dtype=p.dtype)).sum() for i, p in enumerate(self.parameters())]
        return torch.stack(terms).sum()


def _odd_shapes(dtype: torch.dtype, bucket_numel: int | None) -> None:
    rank = dist.get_rank()
    model = OddShapes(dtype)
    low_precision = dtype in (torch.float16, torch.bfloat16)
    reference = copy.deepcopy(model).to(torch.float32 if low_precision else dtype)
    start = weights(model)
    opt = wrap(model, bucket_numel=bucket_numel, weight_decay=0.1)
    assert_same(weights(model), start)
    assert model.conv.weight.shape == (6, 3, 3, 3)
    flat = {n: _as_planned(n, p) for n, p in reference.named_parameters()}
    holder = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(t) for n, t in flat.items()})
    pair = TorchPair(holder, lambda _, p: p.ndim == 2, weight_decay=0.1)
    for step in range(3):
        model.loss(1000 * step + 100 * rank).backward()
        opt.clip_grad_norm_(3e38)
        found = reduced(opt)
        mean = _expected_mean(model, step)
        for name, grad in mean.items():
            assert torch.equal(found[name], grad.flatten().to(found[name].dtype)), name
        for name, p in holder.items():
            key = next(n for n in mean if n.replace(".", "_") == name)
            p.grad = _as_planned(key, mean[key]).to(p.dtype)
        opt.step()
        opt.zero_grad()
        pair.step()
        for name, now in weights(model).items():
            if name == "stack":
                continue  # torch has no rule for stacks; see test_b23
            expected = holder[name.replace(".", "_")].detach().reshape(now.shape).to(dtype)
            assert torch.equal(now, expected), (name, step)
    assert padding_is_zero(opt)
    assert_ranks_agree(model)


def _as_planned(name: str, tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(tensor.shape[0], -1).clone() if name == "conv.weight" else tensor.detach().clone()


def _expected_mean(model: OddShapes, step: int) -> dict[str, Tensor]:
    low_precision = model.scalar.dtype in (torch.float16, torch.bfloat16)
    mean: dict[str, Tensor] = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        total: Tensor | float = 0.0
        for rank in range(dist.get_world_size()):
            grad = data(1000 * step + 100 * rank + i, *p.shape, dtype=p.dtype)
            total = total + (grad.float() if low_precision else grad)
        assert isinstance(total, Tensor)
        mean[name] = total / dist.get_world_size()
    return mean


@pytest.mark.parametrize("bucket_numel", [1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_shape_layout_and_dtype(dtype: torch.dtype, bucket_numel: int | None) -> None:
    run_ranks(3, _odd_shapes, dtype, bucket_numel)


class Branches(nn.Module):
    """Layers that each call may use or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(31)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))
        self.norm = nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for index in used:
            x = x + torch.tanh(self.layers[index](x))
        # Uneven, for the plain sum of a normalised vector is constant: its gradient would be nothing but rounding,
        # below the norm at which Newton-Schulz deliberately departs from torch.
        return self.norm(x) * self.gain * torch.linspace(-1.0, 1.0, 8) if len(used) % 2 else x.square()


def _fuzz(seed: int) -> None:
    """Random programs, different on every rank: branches, windows, no_sync, no backward at all, discarded windows."""
    rank = dist.get_rank()
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    model = Branches()
    reference = copy.deepcopy(model)
    layout = {"bucket_numel": shared.choice([1, 150, None]), "grad_memory": shared.choice(["full", "sharded"])}
    opt = wrap(model, weight_decay=0.1, overlap=shared.random() < 0.7, **layout)
    pair = TorchPair(reference, weight_decay=0.1)
    for step in range(8):
        if shared.random() < 0.2:  # all ranks alike: a window that is thrown away
            model(data(own.randrange(10**6), 2, 8), (0, 3)).sum().backward()
            own.choice([opt.zero_grad, lambda: model.zero_grad(), lambda: model.zero_grad(set_to_none=False)])()
            opt.zero_grad()
        for p in reference.parameters():
            p.grad = None
        for _ in range(own.choice([0, 1, 1, 1, 2, 3])):
            used = tuple(sorted(own.sample(range(7), own.randrange(1, 6))))
            x = data(own.randrange(10**6), own.choice([0, 1, 3]), 8)
            with opt.no_sync() if own.random() < 0.5 else contextlib.nullcontext():
                model(x, used).sum().backward()
            reference(x, used).sum().backward()
            if own.random() < 0.3:
                with torch.no_grad():
                    model(x, (1, 2))
        found = reduced(opt)  # before any collective of ours: a rank may stand in its backward until all have come here
        mean = mean_over_ranks({n: p.grad for n, p in reference.named_parameters()})
        for name, p in reference.named_parameters():
            grad = mean[name]
            p.grad = None
            if grad is None:
                assert not found[name].any(), name
                continue
            torch.testing.assert_close(found[name], grad.flatten(), rtol=1e-5, atol=1e-6)
            p.grad = found[name].view(p.shape).clone()
        opt.step()
        opt.zero_grad()
        pair.step()
        assert_same(weights(model), weights(reference), f"step {step}:")
    assert padding_is_zero(opt)
    assert_ranks_agree(model)
    assert (
        len({tuple(p.num_steps for p in opt._params), *map(tuple, everywhere([p.num_steps for p in opt._params]))}) == 1
    )


def _fuzz_many(seeds: list[int]) -> None:
    for seed in seeds:
        _fuzz(seed)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_programs_that_differ_between_ranks(num_ranks: int) -> None:
    run_ranks(num_ranks, _fuzz_many, [0, 1, 2])


@pytest.mark.slow
def test_many_random_programs() -> None:
    for num_ranks in (2, 3, 4):
        run_ranks(num_ranks, _fuzz_many, list(range(100, 115)), timeout_s=200)


@dataclasses.dataclass
class Output:
    loss: Tensor
    note: str = "a note"


@dataclasses.dataclass(slots=True)
class SlottedOutput:
    loss: Tensor


class NamedOutput(NamedTuple):
    loss: Tensor
    nothing: None = None


class Opaque:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class ManyOutputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(32)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        loss = self.b(torch.tanh(self.a(x))).square().mean()
        makers: dict[str, Any] = {
            "dict": lambda: {"deep": [{"loss": loss}], "count": 3},
            "dataclass": lambda: Output(loss),
            "slots": lambda: SlottedOutput(loss),
            "tuple": lambda: (None, (loss,), "text"),
            "namedtuple": lambda: NamedOutput(loss),
            "list": lambda: [x, loss],
            "opaque": lambda: Opaque(loss),
            "leaf": lambda: (loss, self.a.weight, x),
            "class": lambda: (loss, Output),
        }
        self.kept = loss
        return makers[self.kind]() if self.kind in makers else None


def _outputs(kinds: list[str]) -> None:
    rank = dist.get_rank()
    for kind in kinds:
        model, plain = ManyOutputs(kind), ManyOutputs("list")
        opt, off = wrap(model, bucket_numel=1), wrap(plain, bucket_numel=1, overlap=False)
        for step in range(3):
            x = data(2 * step + rank, 3, 8)
            for each, optimizer in ((model, opt), (plain, off)):
                optimizer._log.clear()
                each(x)
                assert each.kept is not None
                each.kept.backward()
                assert launches(optimizer) == list(range(len(optimizer._buckets))), kind  # all of it by the end
                optimizer.step()
                optimizer.zero_grad()
        assert_same(weights(model), weights(plain), kind)
        assert not model.a.weight._backward_hooks, kind  # nothing piles up
        opt.close()
        off.close()


def test_a_forward_may_return_anything() -> None:
    kinds = ["dict", "dataclass", "slots", "tuple", "namedtuple", "list", "opaque", "leaf", "class", "none"]
    run_ranks(2, _outputs, kinds)


def _independent() -> None:
    """On rank 1 the loss depends on no param; on one step its batch is empty."""
    rank, model = dist.get_rank(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    reference = copy.deepcopy(model)
    opt, pair = wrap(model, bucket_numel=1), TorchPair(reference)
    for step in range(3):
        x = data(step, 4, 8)
        if rank == 0:
            model(x).square().mean().backward()
        elif step == 0:
            free = torch.zeros(3, requires_grad=True)
            (model(x).detach().sum() + free.sum()).backward()
        elif step == 1:
            model(x[:0]).square().sum().backward()
        else:
            (model(x).square().mean() * 0.0).backward()
        (reference(x).square().mean() / 2).backward()
        opt.step()
        opt.zero_grad()
        pair.step()
        pair.zero_grad()
        assert_same(weights(model), weights(reference), f"step {step}:")


def test_a_loss_without_params_and_an_empty_batch() -> None:
    run_ranks(2, _independent)


def _mixture() -> None:
    """Four dtypes in one model, reduced in fp64; groups of one param each."""
    rank = dist.get_rank()
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    torch.manual_seed(36)
    model = nn.ModuleList(nn.Linear(5, 3).to(dtype) for dtype in dtypes)
    reference = copy.deepcopy(model).double()
    opt = LayerwiseOptimizer(
        model,
        matrix=Muon(lr=0.02, weight_decay=0.0),
        elementwise=AdamW(lr=0.01, weight_decay=0.0),
        groups=[Group(name, lr=0.01) for name, _ in model.named_parameters()],
        reduce_dtype=torch.float64,
    )
    for step in range(3):
        for each in (model, reference):
            terms = [
                (p.double() * data(100 * step + 10 * i + rank, *p.shape)).sum() for i, p in enumerate(each.parameters())
            ]
            torch.stack(terms).sum().backward()
        norm = opt.clip_grad_norm_(3e38)
        total = mean_over_ranks({n: p.grad for n, p in reference.named_parameters()})
        expected = torch.stack([g.square().sum() for g in total.values() if g is not None]).sum().sqrt()
        assert float(norm) == pytest.approx(float(expected), rel=1e-2)
        opt.step()
        opt.zero_grad()
        reference.zero_grad()
    assert [next(m.parameters()).dtype for m in model] == dtypes
    assert len(opt._buckets) == 8
    assert_ranks_agree(model)


def test_four_dtypes_in_one_model() -> None:
    run_ranks(2, _mixture)
