"""Overlap, proven by the order of events, and the safety of weights that are still on their way.

All of it runs on a transport whose results appear in ``wait()`` alone (``LateComm``): a read that waits for nothing sees the
weights of the step before, every time.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import models
from fake_comm import late_arrivals
from freehold import LayerwiseOptimizer
from freehold.runtime import hooks as hooks_module
from freehold.runtime.guard import StaleReadGuard
from ranks import run_ranks
from reference import Recipe, assert_equal_params, assert_equal_ranks

RULES = Recipe().rules()


def _chain(num_layers: int = 6, width: int = 16) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(*(nn.Linear(width, width, bias=i % 2 == 0) for i in range(num_layers)))


def _optimizer(model: nn.Module, *, bucket_numel: int | None = 256, overlap: bool = True) -> LayerwiseOptimizer:
    return LayerwiseOptimizer(model, **RULES, bucket_numel=bucket_numel, overlap=overlap)


def _inputs(width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(30 + dist.get_rank())
    return torch.randn(4, width, generator=generator)


def _events(opt: LayerwiseOptimizer) -> list[tuple[str, int]]:
    return [(event.kind, event.bucket) for event in opt._log.events()]


def _mark_backward(module: nn.Module, opt: LayerwiseOptimizer, mark: int) -> None:
    """Record when backward reaches the output of ``module``."""

    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(lambda grad: opt._log.add("backward reached", mark))  # type: ignore[arg-type]

    module.register_forward_hook(hook)


# ---- reductions ---------------------------------------------------------------------------------------------------------


def _order_of_reductions() -> list[list[tuple[str, int]]]:
    model = _chain()
    with late_arrivals():
        opt = _optimizer(model)
    for i, layer in enumerate(model):
        _mark_backward(layer, opt, i)
    steps = []
    for _ in range(3):
        opt._log.clear()
        model(_inputs()).square().mean().backward()
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
        loss = model(_inputs(), orders[dist.get_rank()])
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


# ---- gathers ------------------------------------------------------------------------------------------------------------


def _order_of_gathers() -> None:
    model = _chain()
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
        model(_inputs()).square().mean().backward()
        opt.step()
        zero_grad()
        launches = [bucket for kind, bucket in _events(opt) if kind == "gather launched"]
        assert launches == list(range(len(opt.layout.buckets) - 1, -1, -1)), launches
        assert not any(kind == "gather finished" for kind, _ in _events(opt)), "step or zero_grad waited for a gather"
        opt._log.clear()
        finished_at.clear()
        model(_inputs())
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
        loss = model(_inputs(), skip=step % 3 == 2).square().mean()
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


# ---- stale reads --------------------------------------------------------------------------------------------------------


def _ema(model: nn.Module) -> Tensor:
    averages = [torch.zeros_like(p) for p in model.parameters()]
    torch._foreach_lerp_(averages, list(model.parameters()), 0.5)
    return torch.cat([average.flatten() for average in averages])


def _swa(model: nn.Module) -> Tensor:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    return torch.cat([p.detach().flatten() for p in averaged.parameters()])


def _saved(model: nn.Module) -> Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.cat([value.flatten() for value in torch.load(file).values()])


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.flatten() for p in model.parameters()])


READS: dict[str, Callable[[nn.Module], Tensor]] = {
    "norm of each": lambda model: torch.stack([p.norm() for p in model.parameters()]),
    "norm of all": lambda model: nn.utils.get_total_norm(list(model.parameters())),
    "arithmetic": lambda model: sum((p * 2).sum() for p in model.parameters()),
    "data": lambda model: torch.cat([p.data.flatten() for p in model.parameters()]),
    "detach": lambda model: torch.cat([p.detach().flatten() for p in model.parameters()]),
    "index": lambda model: torch.stack([p[0].sum() for p in model.parameters()]),
    "item": lambda model: torch.tensor([p.flatten()[0].item() for p in model.parameters()]),
    "tolist": lambda model: torch.tensor([p.tolist()[0] for p in model.parameters() if p.ndim == 1]),
    "numpy": lambda model: torch.cat([torch.tensor(p.detach().numpy()).flatten() for p in model.parameters()]),
    "foreign linear": lambda model: F.linear(torch.ones(1, 16), model[3].weight, model[2].bias),
    "foreign linear by keyword": lambda model: F.linear(input=torch.ones(1, 16), weight=model[3].weight),
    "parameters_to_vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "average by foreach": _ema,
    "AveragedModel": _swa,
    "deepcopy": lambda model: _flat(copy.deepcopy(model)),
    "state_dict": lambda model: torch.cat([value.flatten() for value in model.state_dict().values()]),
    "state_dict of a child": lambda model: torch.cat([value.flatten() for value in model[2].state_dict().values()]),
    "torch.save": _saved,
    "forward": lambda model: model(torch.ones(1, 16)),
    "forward of a child": lambda model: model[4](torch.ones(1, 16)),
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), torch.ones(1, 16)
    ),
}


@contextlib.contextmanager
def _without(what: str) -> Iterator[None]:
    """The runtime with one of its two protections taken out."""
    with contextlib.ExitStack() as stack:
        if what == "guard":
            stack.enter_context(mock.patch.object(StaleReadGuard, "install", lambda self: None))
        if what == "hooks":
            stack.enter_context(mock.patch.object(hooks_module._WaitForWeights, "__call__", lambda *args: None))
            stack.enter_context(mock.patch.object(hooks_module._WaitForAll, "__call__", lambda *args: None))
        yield


def _wrong_reads(names: list[str], without: str) -> list[str]:
    """Which reads, right after a step, see anything but the new weights."""
    wrong = []
    for name in names:
        model = _chain()
        with late_arrivals(), _without(without):
            opt = _optimizer(model)
            model(_inputs()).square().mean().backward()
            opt.step()
            seen = READS[name](model)
            opt.synchronize()
            expected = READS[name](model)
            opt.close()
        if not torch.equal(seen, expected):
            wrong.append(name)
    return wrong


def test_every_read_right_after_a_step_sees_the_new_weights() -> None:
    assert run_ranks(2, _wrong_reads, list(READS), "nothing") == [[], []]


def test_without_the_guard_reads_are_stale() -> None:
    """The teeth of the test above: with the guard taken out, it would fail."""
    unprotected = ["norm of each", "average by foreach", "foreign linear", "detach", "deepcopy"]
    ours, theirs = run_ranks(2, _wrong_reads, unprotected, "guard")
    assert {*ours, *theirs} == set(unprotected)  # what a rank owns itself is never stale


def test_hooks_suffice_for_forward_and_state_dict() -> None:
    """Without the guard: what a module reads itself is waited for by its own hook."""
    assert run_ranks(2, _wrong_reads, ["forward", "forward of a child", "state_dict"], "guard") == [[], []]


def _wrong_forward_without_both() -> list[str]:
    with _without("hooks"):
        return _wrong_reads(["forward", "forward of a child", "state_dict"], "guard")


def test_without_hooks_and_guard_forward_is_stale() -> None:
    """The teeth of the test above."""
    ours, theirs = run_ranks(2, _wrong_forward_without_both)
    assert {*ours, *theirs} == {"forward", "forward of a child", "state_dict"}


# ---- the guard and the user's own torch function modes ----------------------------------------------------------------------


class CountingMode(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _stack_is_left_as_it_was() -> None:
    model = _chain()
    with late_arrivals():
        opt = _optimizer(model)
    mine = CountingMode()

    def step() -> None:
        model(_inputs()).square().mean().backward()
        opt.step()
        opt.zero_grad()

    with torch.device("cpu"), mine:
        inside = [mode for mode in _get_current_function_mode_stack()]
        step()
        step()
        assert [mode for mode in _get_current_function_mode_stack() if mode is not opt._guard] == inside
        counted = mine.calls
        torch.ones(1).add(1)
        assert mine.calls > counted, "the user's mode sees no more calls"
    assert [mode for mode in _get_current_function_mode_stack() if mode is not opt._guard] == []
    step()
    with torch.device("cpu"):
        opt.synchronize()
        assert len(_get_current_function_mode_stack()) == 1
    with mine:
        step()
    opt.synchronize()
    assert _get_current_function_mode_stack() == []
    torch.set_default_device("cpu")
    step()
    torch.set_default_device(None)
    opt.close()
    assert _get_current_function_mode_stack() == []


def test_the_guard_leaves_the_stack_of_function_modes_intact() -> None:
    run_ranks(2, _stack_is_left_as_it_was)
