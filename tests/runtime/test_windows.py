"""What one step covers: every way of accumulating, discarding and interfering with gradients between two steps.

Each scenario runs on two ranks, with fp32 params (``p.grad`` can be a view of the bucket) and with bf16 params (it
cannot).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from window_world import World


def one_backward(w: World) -> None:
    w.plain_step(0)
    w.plain_step(1)


def accumulation(w: World) -> None:
    expected = w.mean(0, 1, 2)
    w.backward(0, sync=False)
    w.backward(1, sync=False)
    w.backward(2)
    w.check(expected)


def two_backwards_without_no_sync(w: World) -> None:
    expected = w.mean(0, 1)
    w.backward(0)
    w.backward(1)
    w.check(expected)


def passes_of_all_kinds(w: World) -> None:
    expected = w.mean(0, 1, 2, 3, 4)
    w.backward(0)
    w.backward(1, sync=False)
    w.backward(2)
    w.backward(3)
    w.backward(4, sync=False)
    w.check(expected)


def step_after_no_sync_only(w: World) -> None:
    expected = w.mean(0, 1)
    w.backward(0, sync=False)
    w.backward(1, sync=False)
    w.check(expected)


def step_without_zero_grad(w: World) -> None:
    """A completed step starts a new window by itself."""
    w.backward(0)
    w.opt.step()
    expected = w.mean(1)
    w.backward(1)
    w.check(expected)
    expected = w.mean(2, 3)
    w.backward(2, sync=False)
    w.backward(3)
    w.check(expected)


def step_without_backward(w: World) -> None:
    names = [name for name, _ in w.model.named_parameters()]
    w.check({}, unused=names)


def _discard(how: Callable[[World], None], sync: bool, zeros_count: bool = False) -> Callable[[World], None]:
    """Discard by ``how``. ``zeros_count``: fp32 gradients that were zeroed where they lie count, as in torch."""

    def scenario(w: World) -> None:
        w.backward(7, sync=False)
        w.backward(8, sync=sync)
        how(w)
        expected = w.mean(0, 1)
        w.backward(0, sync=False)
        w.backward(1)
        w.check(expected)
        how(w)
        w.backward(9, sync=sync)
        how(w)
        names = [name for name, _ in w.model.named_parameters()]
        w.check({}, unused=[] if zeros_count and w.dtype == torch.float32 else names)

    return scenario


def grads_set_by_hand(w: World) -> None:
    expected = w.mean(3)
    for name, p in w.model.named_parameters():
        p.grad = w.local_grads(3, w.rank)[name].to(w.dtype)
    w.check(expected)


def a_grad_replaced_in_no_sync(w: World) -> None:
    expected = w.mean(0)
    w.backward(0, sync=False)
    last = w.model[5].weight
    last.grad = torch.full_like(last, 1.0 + w.rank)
    expected["5.weight"] = torch.full(last.shape, 1.5)
    w.check(expected)


def a_grad_set_to_none_on_all_ranks(w: World) -> None:
    expected = w.mean(0)
    w.backward(0, sync=False)
    w.model[2].weight.grad = None
    del expected["2.weight"]
    w.check(expected, unused=["2.weight"])


def a_grad_set_to_none_on_one_rank(w: World) -> None:
    """As in torch: what one rank does not use counts as zero there."""
    expected = w.mean(0)
    other = w.local_grads(0, 1)["2.weight"] / 2
    w.backward(0, sync=False)
    if w.rank == 0:
        w.model[2].weight.grad = None
    w.check({**expected, "2.weight": other})


def a_grad_set_to_none_then_more(w: World) -> None:
    expected = w.mean(0, 1)
    expected["2.weight"] = w.mean(1)["2.weight"]
    w.backward(0, sync=False)
    w.model[2].weight.grad = None
    w.backward(1)
    w.check(expected)


def grads_set_to_none_between_two_reductions(w: World) -> None:
    """One alone in its bucket and one among others."""
    expected = w.mean(0, 1)
    second = w.mean(1)
    w.backward(0)
    for name in ("2.weight", "2.bias"):
        w.model.get_parameter(name).grad = None
        expected[name] = second[name]
    w.backward(1)
    w.check(expected)


def a_grad_set_to_none_after_its_reduction(w: World) -> None:
    expected = w.mean(0)
    del expected["2.weight"]
    w.backward(0)
    w.model[2].weight.grad = None
    w.check(expected, unused=["2.weight"])


def retain_graph(w: World) -> None:
    expected = w.mean(0, scale=2.0)
    loss = w.loss(0)
    loss.backward(retain_graph=True)
    loss.backward()
    w.check(expected)


def retain_graph_in_no_sync(w: World) -> None:
    expected = w.mean(0, scale=2.0)
    loss = w.loss(0)
    with w.opt.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()
    w.check(expected)


def autograd_grad_in_between(w: World) -> None:
    expected = w.mean(0, 1)
    params = list(w.model.parameters())
    torch.autograd.grad(w.loss(5), params)
    w.backward(0, sync=False)
    torch.autograd.grad(w.loss(5), params)
    w.backward(1)
    torch.autograd.grad(w.loss(5), params)
    w.check(expected)
    torch.autograd.grad(w.loss(5), params)
    w.plain_step(6)


def autograd_grad_on_one_rank(w: World) -> None:
    expected = w.mean(0, 1)
    params = list(w.model.parameters())
    w.backward(0, sync=False)
    if w.rank == 0:
        torch.autograd.grad(w.loss(5), params)
    w.backward(1)
    if w.rank == 1:
        torch.autograd.grad(w.loss(5), params)
    w.check(expected)


def autograd_grad_of_inputs(w: World) -> None:
    expected = w.mean(0)
    x = w.batch(5, w.rank).requires_grad_()
    torch.autograd.grad(w.model(x).float().sum(), x)
    w.backward(0)
    torch.autograd.grad(w.model(x).float().sum(), x)
    w.check(expected)


def gradient_penalty(w: World) -> None:
    """A backward through a gradient."""

    def penalty(model: nn.Module, rank: int) -> Tensor:
        x = w.batch(0, rank).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
        return grad.float().square().mean()

    expected: dict[str, Tensor] = {}
    for rank in range(2):
        twin = w.plain_copy()
        penalty(twin, rank).backward()
        for name, p in twin.named_parameters():
            if p.grad is not None:
                expected[name] = expected.get(name, 0) + p.grad.float() / 2
    penalty(w.model, w.rank).backward()
    unused = {name for name, _ in w.model.named_parameters()} - set(expected)
    w.check(expected, unused=unused)


def _fail_in_backward(w: World, number: int) -> None:
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("planted")

    handle = w.model[2].register_forward_hook(lambda module, args, output: (output.register_hook(fail), None)[1])
    with pytest.raises(ArithmeticError, match="planted"):
        w.backward(number)
    handle.remove()


def exception_in_backward(w: World) -> None:
    _fail_in_backward(w, 0)
    w.opt.zero_grad()
    w.plain_step(1)
    w.backward(2, sync=False)
    _fail_in_backward(w, 3)
    w.model.zero_grad()
    w.plain_step(4)


def exception_in_backward_on_one_rank(w: World) -> None:
    if w.rank == 1:
        _fail_in_backward(w, 0)
    else:
        w.backward(0)
    w.opt.zero_grad()
    w.plain_step(1)


def exception_in_forward(w: World) -> None:
    with pytest.raises(RuntimeError):
        w.model(torch.zeros(2, 3, dtype=w.dtype))
    w.plain_step(1)


def no_sync_is_left_by_an_exception(w: World) -> None:
    with pytest.raises(ArithmeticError), w.opt.no_sync():
        raise ArithmeticError
    w.plain_step(1)


def no_sync_nests(w: World) -> None:
    expected = w.mean(0, 1, 2)
    with w.opt.no_sync():
        w.backward(0, sync=False)
        w.backward(1)
    assert not any(event.kind == "reduce launched" for event in w.opt._log.events())
    w.backward(2)
    w.check(expected)


def part_of_the_model_in_each_backward(w: World) -> None:
    """Like a GAN or an alternating loss: each backward reaches other params."""
    expected = w.mean(0)
    x = w.batch(0, w.rank)
    hidden = w.model[:5](x)
    leaf = hidden.detach().requires_grad_()
    w.model[5](leaf).float().square().mean().backward()
    hidden.backward(leaf.grad)
    w.check(expected)


def a_closure(w: World) -> None:
    expected = w.mean(0)
    before = w.plain_copy()
    value = w.opt.step(lambda: _closure(w, 0))
    assert value.item() == before(w.batch(0, w.rank)).float().square().mean().item()
    w.opt.synchronize()
    twin = World(w.dtype)
    twin.backward(0)
    twin.check(expected)
    for p, q in zip(w.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p, q)
    twin.opt.close()


def _closure(w: World, number: int) -> Tensor:
    w.opt.zero_grad()
    loss = w.loss(number)
    loss.backward()
    return loss


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        one_backward,
        accumulation,
        two_backwards_without_no_sync,
        passes_of_all_kinds,
        step_after_no_sync_only,
        step_without_zero_grad,
        step_without_backward,
        grads_set_by_hand,
        a_grad_replaced_in_no_sync,
        a_grad_set_to_none_on_all_ranks,
        a_grad_set_to_none_on_one_rank,
        a_grad_set_to_none_then_more,
        grads_set_to_none_between_two_reductions,
        a_grad_set_to_none_after_its_reduction,
        retain_graph,
        retain_graph_in_no_sync,
        autograd_grad_in_between,
        autograd_grad_on_one_rank,
        autograd_grad_of_inputs,
        gradient_penalty,
        exception_in_backward,
        exception_in_backward_on_one_rank,
        exception_in_forward,
        no_sync_is_left_by_an_exception,
        no_sync_nests,
        part_of_the_model_in_each_backward,
        a_closure,
    )
}
for owner in ("opt", "model"):
    for set_to_none in (True, False):
        for sync in (True, False):
            SCENARIOS[f"{owner}_zero_grad_{set_to_none}_after_{'sync' if sync else 'no_sync'}"] = _discard(
                lambda w, owner=owner, to_none=set_to_none: getattr(w, owner).zero_grad(set_to_none=to_none),
                sync,
                zeros_count=owner == "model" and not set_to_none and not sync,
            )


def _run(name: str, dtype: torch.dtype) -> None:
    world = World(dtype)
    SCENARIOS[name](world)
    world.opt.zero_grad()
    world.plain_step(99)
    world.opt.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_window(name: str, dtype: torch.dtype) -> None:
    run_ranks(2, _run, name, dtype, timeout_s=60)
