"""Weights that are still on their way are never read, wherever they are read.

All of it runs on a transport whose results appear in ``wait()`` alone (``LateComm``): a read that waits for nothing
sees the weights of the step before, every time.
"""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from fake_comm import late_arrivals
from ranks import run_ranks
from reference import Recipe
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from freehold import LayerwiseOptimizer
from freehold.runtime import guard as guard_module
from freehold.runtime import hooks as hooks_module
from freehold.runtime.guard import StaleReadGuard

RULES = Recipe().rules()


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
            stack.enter_context(mock.patch.object(StaleReadGuard, "install"))
        if what == "hooks":
            stack.enter_context(mock.patch.object(hooks_module._WaitForWeights, "__call__", return_value=None))
            stack.enter_context(mock.patch.object(hooks_module._WaitForAll, "__call__", return_value=None))
        yield


def _wrong_reads(names: list[str], without: str) -> list[str]:
    """Which reads, right after a step, see anything but the new weights."""
    wrong = []
    for name in names:
        model = models.chain()
        with late_arrivals(), _without(without):
            opt = LayerwiseOptimizer(model, **RULES, bucket_numel=256)
            model(models.chain_inputs(dist.get_rank())).square().mean().backward()
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


class CountingMode(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _stack_is_left_as_it_was() -> None:
    model = models.chain()
    with late_arrivals():
        opt = LayerwiseOptimizer(model, **RULES, bucket_numel=256)
    mine = CountingMode()

    def step() -> None:
        model(models.chain_inputs(dist.get_rank())).square().mean().backward()
        opt.step()
        opt.zero_grad()

    step()
    assert opt._guard.installed()
    model(models.chain_inputs(dist.get_rank()))
    assert not opt._guard.installed(), "nothing is on its way any more, and calls are still looked at"
    with torch.device("cpu"), mine:
        inside = list(_get_current_function_mode_stack())
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


def _guard() -> StaleReadGuard:
    return StaleReadGuard(mock.Mock(busy=True))


def test_a_guard_retired_from_another_thread_does_nothing_and_goes_with_the_next_change() -> None:
    """The garbage collector runs in any thread; each thread has a stack of its own."""
    theirs, mine = _guard(), _guard()
    gatherer = weakref.ref(theirs._gatherer)
    theirs.install()
    thread = threading.Thread(target=theirs.retire)
    thread.start()
    thread.join()
    assert gatherer() is None, "the buffers are still held"
    nn.Parameter(torch.ones(1)).add(1)
    mine.install()
    assert _get_current_function_mode_stack() == [mine]
    mine.remove()
    assert _get_current_function_mode_stack() == []


def test_a_guard_retired_while_another_is_installed_stays_away() -> None:
    """The garbage collector may run between the reading of the stack and its rebuilding."""
    dropped, mine = _guard(), _guard()
    dropped.install()

    def collect(guard: StaleReadGuard, modes: list[TorchFunctionMode]) -> list[TorchFunctionMode]:
        dropped.retire()
        return [guard, *modes]

    with mock.patch.object(guard_module, "_inserted", collect):
        mine.install()
    assert _get_current_function_mode_stack() == [mine]
    mine.retire()
    assert _get_current_function_mode_stack() == []
