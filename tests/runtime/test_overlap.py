"""Overlap, proven by the order of events and not by time.

All of it runs on a transport whose results appear in ``wait()`` alone (``LateComm``), so that nothing finishes by luck.
"""

from __future__ import annotations

import contextlib

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from fake_comm import late_arrivals
from ranks import run_ranks
from reference import Recipe, assert_equal_params, assert_equal_ranks
from torch import Tensor, nn

from freehold import LayerwiseOptimizer

RULES = Recipe().rules()


def _optimizer(model: nn.Module, *, bucket_numel: int | None = 256, overlap: bool = True) -> LayerwiseOptimizer:
    return LayerwiseOptimizer(model, **RULES, bucket_numel=bucket_numel, overlap=overlap)


def _events(opt: LayerwiseOptimizer) -> list[tuple[str, int]]:
    return [(event.kind, event.bucket) for event in opt._log.events()]


def _mark_backward(module: nn.Module, opt: LayerwiseOptimizer, mark: int) -> None:
    """Record when backward reaches the output of ``module``."""

    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(lambda grad: opt._log.add("backward reached", mark))  # type: ignore[arg-type]

    module.register_forward_hook(hook)


# ---- reductions ----


def _order_of_reductions() -> list[list[tuple[str, int]]]:
    model = models.chain()
    with late_arrivals():
        opt = _optimizer(model)
    for i, layer in enumerate(model):
        _mark_backward(layer, opt, i)
    steps = []
    for _ in range(3):
        opt._log.clear()
        model(models.chain_inputs(dist.get_rank())).square().mean().backward()
        steps.append([e for e in _events(opt) if e[0] in ("backward reached", "reduce launched")])
        opt.step()
        opt.zero_grad()
    opt.close()
    return steps


def test_the_first_reduction_is_launched_before_backward_reaches_the_first_layer() -> None:
    for of_rank in run_ranks(2, _order_of_reductions):
        for events in of_rank:
            launches = [bucket for kind, bucket in events if kind == "reduce launched"]
            assert launches == list(range(len(launches)))
            assert len(launches) >= 4
            reached = [mark for kind, mark in events if kind == "backward reached"]
            assert reached == [5, 4, 3, 2, 1, 0]
            first = events.index(("reduce launched", 0))
            # Bucket 0 is complete as soon as backward leaves the last layer or two, four layers before the first.
            assert first < events.index(("backward reached", 2))
            early = sum(1 for kind, _ in events[: events.index(("backward reached", 0))] if kind == "reduce launched")
            assert early >= len(launches) - 2


class Shuffled(nn.Module):
    """Runs its layers in an order of its own at every call, which differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return sum(self.layers[i](x).square().mean() * (k + 1) for k, i in enumerate(order))


ORDERS = (([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]), ([2, 4], [1, 3, 0]), ([3], [0, 1, 2, 3, 4]), ([0], []))


def _launches_in_any_order() -> list[list[int]]:
    torch.manual_seed(11)
    model = Shuffled()
    with late_arrivals():
        opt = _optimizer(model)
    launches = []
    for orders in ORDERS:
        opt._log.clear()
        loss = model(models.chain_inputs(dist.get_rank()), orders[dist.get_rank()])
        if orders[dist.get_rank()]:
            loss.backward()
        opt.step()
        opt.zero_grad()
        opt.synchronize()
        launches.append([bucket for kind, bucket in _events(opt) if kind == "reduce launched"])
        assert_equal_ranks(model)
    opt.close()
    return launches


def test_launches_are_in_bucket_order_whatever_order_gradients_arrive_in() -> None:
    ours, theirs = run_ranks(2, _launches_in_any_order)
    assert ours == theirs
    assert all(order == list(range(len(ours[0]))) for order in ours)
    assert len(ours[0]) >= 4


# ---- gathers ----


def _order_of_gathers() -> None:
    model = models.chain()
    with late_arrivals():
        opt = _optimizer(model)
    buckets_of = [
        {opt._by_name[f"{i}.{n}"].bucket for n, _ in layer.named_parameters()} for i, layer in enumerate(model)
    ]
    finished_at: list[set[int]] = []

    def note(_module: nn.Module, _args: object) -> None:
        finished_at.append({bucket for kind, bucket in _events(opt) if kind == "gather finished"})

    for layer in model:
        layer.register_forward_pre_hook(note)  # runs after freehold's own, which are put first
    for zero_grad in (opt.zero_grad, model.zero_grad, lambda: opt.zero_grad(set_to_none=False), lambda: None):
        model(models.chain_inputs(dist.get_rank())).square().mean().backward()
        opt.step()
        zero_grad()
        launches = [bucket for kind, bucket in _events(opt) if kind == "gather launched"]
        assert launches == list(range(len(opt.layout.buckets) - 1, -1, -1)), launches
        assert not any(kind == "gather finished" for kind, _ in _events(opt)), "step or zero_grad waited for a gather"
        opt._log.clear()
        finished_at.clear()
        model(models.chain_inputs(dist.get_rank()))
        wanted: set[int] = set()
        for i, finished in enumerate(finished_at):
            wanted |= buckets_of[i]
            assert finished == wanted, f"layer {i} waited for {finished}, all that was to be read is {wanted}"
        opt._log.clear()
    opt.close()


def test_gathers_run_in_reverse_order_and_each_layer_waits_for_its_own_buckets_only() -> None:
    run_ranks(2, _order_of_gathers)


class Skipping(nn.Module):
    """Runs A, C, B in that order; reads B's weight outside B; leaves C out when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.c = nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor, *, skip: bool) -> Tensor:
        x = self.a(x) + self.table[: x.shape[0]]
        x = F.linear(x, self.b.weight).tanh()
        if not skip:
            x = self.c(x)
        return self.b(x)


def _train_skipping(overlap: bool) -> list[Tensor]:
    torch.manual_seed(11)
    model = Skipping()
    with late_arrivals():
        opt = _optimizer(model, overlap=overlap)
    losses = []
    for step in range(6):
        loss = model(models.chain_inputs(dist.get_rank()), skip=step % 3 == 2).square().mean()
        loss.backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    opt.synchronize()
    opt.close()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def _overlap_on_equals_off() -> None:
    for on, off in zip(_train_skipping(True), _train_skipping(False), strict=True):
        assert torch.equal(on, off)


def test_overlap_on_equals_overlap_off() -> None:
    run_ranks(2, _overlap_on_equals_off)


def _late_equals_real(kind: str) -> None:
    """All of B31 in the whole runtime: buffers are read in ``wait()`` only, after freed memory was poisoned."""
    trained = []
    for arrivals in (late_arrivals(), contextlib.nullcontext()):
        model = models.make(kind)
        with arrivals:
            opt = _optimizer(model, bucket_numel=800)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(4):
            for micro in range(2):
                with opt.no_sync() if micro == 0 and step % 2 else contextlib.nullcontext():
                    models.loss_of(model, models.batch(kind, generator)).backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        opt.close()
        trained.append(model)
    assert_equal_params(*trained)


@pytest.mark.parametrize("kind", ["mlp", "gpt_tied"])
def test_b31_a_transport_that_reads_its_buffers_late_changes_nothing(kind: str) -> None:
    run_ranks(2, _late_equals_real, kind)
