"""Stacks of matrices, and mixtures of experts in which some expert gets no token."""

from __future__ import annotations

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference import DDPReference, Recipe, assert_equal_params, assert_equal_ranks
from torch import Tensor, nn

from freehold import LayerwiseOptimizer

RECIPE = Recipe()


class Stacks(nn.Module):
    def __init__(self, shapes: tuple[tuple[int, int, int], ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.stacks = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


def _stack_against_slices(shapes: tuple[tuple[int, int, int], ...], bucket_numel: int | None) -> None:
    """Gradients are given, so both sides see the same bits; one slice of each stack gets zeros every other step."""
    model = Stacks(shapes)
    slices = [[nn.Parameter(matrix.clone()) for matrix in stack.detach()] for stack in model.stacks]
    muon = torch.optim.Muon(
        [matrix for matrices in slices for matrix in matrices],
        lr=RECIPE.matrix_lr,
        weight_decay=RECIPE.weight_decay,
        nesterov=RECIPE.nesterov,
    )
    opt = LayerwiseOptimizer(model, matrix=RECIPE.rules()["matrix"], elementwise=None, bucket_numel=bucket_numel)
    generators = [torch.Generator().manual_seed(50 + rank) for rank in range(dist.get_world_size())]
    for step in range(4):
        given = [[torch.randn(shape, generator=g) for shape in shapes] for g in generators]
        if step % 2:
            for of_rank in given:
                for grad in of_rank:
                    grad[-1] = 0.0
        sum((p * g).sum() for p, g in zip(model.stacks, given[dist.get_rank()], strict=True)).backward()
        for i, matrices in enumerate(slices):
            mean = sum(of_rank[i] for of_rank in given) / len(given)
            for matrix, grad in zip(matrices, mean, strict=True):
                matrix.grad = grad.clone()
        opt.step()
        opt.zero_grad()
        muon.step()
        opt.synchronize()
        for stack, matrices in zip(model.stacks, slices, strict=True):
            for e, matrix in enumerate(matrices):
                assert torch.equal(stack[e], matrix), f"{step=} slice {e} of {tuple(stack.shape)}"
    opt.close()


@pytest.mark.parametrize(
    ("num_ranks", "shapes", "bucket_numel"),
    [
        (2, ((4, 8, 16),), None),
        (2, ((3, 17, 9), (5, 16, 8), (1, 8, 8)), 400),
        (3, ((8, 8, 24), (2, 24, 8), (3, 8, 8)), None),
        (3, ((2, 16, 12),), 1),
    ],
)
def test_a_stack_is_updated_as_its_matrices_would_be(
    num_ranks: int, shapes: tuple[tuple[int, int, int], ...], bucket_numel: int | None
) -> None:
    run_ranks(num_ranks, _stack_against_slices, shapes, bucket_numel)


# Tokens of the 8 inputs to experts, by step and rank: all used; expert 2 on rank 0 only; expert 1 nowhere; all of rank
# 1's tokens to expert 0; expert 3 nowhere and expert 1 on rank 1 only; all used again.
EXPERT_OF = (
    ((0, 1, 2, 3, 0, 1, 2, 3), (3, 2, 1, 0, 3, 2, 1, 0)),
    ((0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 0, 3, 0, 1, 3, 3)),
    ((0, 0, 2, 3, 0, 3, 2, 3), (0, 0, 0, 3, 0, 2, 3, 3)),
    ((1, 1, 2, 3, 1, 3, 2, 3), (0, 0, 0, 0, 0, 0, 0, 0)),
    ((0, 0, 2, 2, 0, 2, 0, 2), (1, 1, 0, 2, 0, 1, 2, 2)),
    ((0, 1, 2, 3, 0, 1, 2, 3), (3, 2, 1, 0, 3, 2, 1, 0)),
)


def _tokens(step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 12, generator=generator), torch.tensor(EXPERT_OF[step][dist.get_rank()])


def _unused_everywhere(step: int) -> set[int]:
    return set(range(4)) - {expert for of_rank in EXPERT_OF[step] for expert in of_rank}


def _separate_experts(window: int) -> list[list[tuple[str, int]]]:
    """Against DDP, which leaves the gradient of what no rank used at ``None``."""
    model = models.make("separate")
    reference = DDPReference(model, RECIPE, find_unused=True)
    opt = LayerwiseOptimizer(model, **RECIPE.rules(), bucket_numel=300)
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    launches = []
    for step in range(len(EXPERT_OF)):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        opt._log.clear()
        for micro in range(window):
            inputs = _tokens(step, generator)
            if micro < window - 1:
                with opt.no_sync():
                    models.loss_of(model, inputs).backward()
            else:
                models.loss_of(model, inputs).backward()
            reference.backward(inputs, sync=micro == window - 1)
        launches.append([(e.kind, e.bucket) for e in opt._log.events() if e.kind == "reduce launched"])
        opt.step()
        opt.zero_grad()
        reference.step()
        assert_equal_params(model, reference.model, f"{step=}")
        assert_equal_ranks(model, f"{step=}")
        for expert in _unused_everywhere(step):
            for name in (f"up.{expert}.weight", f"down.{expert}.weight"):
                assert torch.equal(model.get_parameter(name), before[name]), f"{step=}: unused {name} moved"
    num_buckets = len(opt.layout.buckets)
    opt.close()
    assert all(of_step == [("reduce launched", i) for i in range(num_buckets)] for of_step in launches), launches
    return launches


@pytest.mark.parametrize("window", [1, 2])
def test_experts_without_tokens_equal_ddp_and_nothing_waits_for_step(window: int) -> None:
    """Every bucket is launched, in order, by the end of backward on every rank, whoever got no token."""
    launches = run_ranks(2, _separate_experts, window)
    assert launches[0] == launches[1]
    assert len(launches[0][0]) >= 4


def _buckets_launched_in_backward() -> tuple[int, int, int]:
    model = models.make("separate")
    opt = LayerwiseOptimizer(model, **RECIPE.rules(), bucket_numel=300)
    held_back = min(p.bucket for p in opt._params if p.name in ("up.0.weight", "down.0.weight"))
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    model.first.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: opt._log.add("first layer", -1)) and None
    )
    x, _ = _tokens(0, generator)
    expert_of = torch.tensor([0, 1, 2, 3] * 2) if dist.get_rank() == 0 else torch.tensor([1, 2, 3, 3] * 2)
    models.loss_of(model, (x, expert_of)).backward()
    kinds = [e.kind for e in opt._log.events() if e.kind in ("first layer", "reduce launched")]
    opt.step()
    opt.close()
    return held_back, kinds.index("first layer"), kinds.count("reduce launched")


def test_buckets_before_a_missing_expert_are_still_launched_early() -> None:
    (_, launched_0, total_0), (held_back, launched_1, total_1) = run_ranks(2, _buckets_launched_in_backward)
    assert total_0 == total_1
    assert held_back > 0
    assert launched_1 == held_back, "a rank launches what is complete up to the bucket of its token-less expert"
    assert launched_0 > launched_1


def _stacked_experts() -> None:
    """A stack that runs has a gradient for all its slices: DDP's, and torch.optim.Muon slice by slice."""
    model = models.make("stacked")
    opt = LayerwiseOptimizer(model, **RECIPE.rules(), bucket_numel=300)
    reference = DDPReference(model, RECIPE, find_unused=True)
    stacks = {n: p for n, p in reference.model.named_parameters() if p.ndim == 3}
    slices = {n: [nn.Parameter(matrix.clone()) for matrix in p.detach()] for n, p in stacks.items()}
    reference.optimizers += RECIPE.torch_optimizers(
        (f"{name}.{e}", matrix) for name, group in slices.items() for e, matrix in enumerate(group)
    )
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    for step in range(len(EXPERT_OF)):
        inputs = _tokens(step, generator)
        models.loss_of(model, inputs).backward()
        reference.backward(inputs)
        for name, stack in stacks.items():
            for e, matrix in enumerate(slices[name]):
                matrix.grad = stack.grad[e].clone()
        opt.step()
        opt.zero_grad()
        reference.step()
        with torch.no_grad():
            for name, stack in stacks.items():
                stack.copy_(torch.stack(list(slices[name])))
                stack.grad = None
        assert_equal_params(model, reference.model, f"{step=}")
        assert_equal_ranks(model, f"{step=}")
    opt.close()


def test_experts_in_stacks_equal_ddp() -> None:
    run_ranks(2, _stacked_experts)


def _stack_unused_on_one_rank_then_on_all() -> None:
    model = Stacks(((4, 8, 16), (2, 8, 8)))
    opt = LayerwiseOptimizer(model, matrix=RECIPE.rules()["matrix"], elementwise=None, bucket_numel=1)
    first, second = model.stacks
    rank = dist.get_rank()
    loss = second.square().sum() + (first.square().sum() if rank == 0 else 0.0)
    expected = first.detach().clone()  # d/dw of w^2 is 2w on one rank of two
    loss.backward()
    opt.clip_grad_norm_(1e30)
    for name, start, piece in opt.reduced_grads():
        if name == "stacks.0":
            assert torch.equal(piece, expected.flatten()[start : start + piece.numel()])
    opt.step()
    opt.zero_grad()
    opt.synchronize()
    before = first.detach().clone()
    second.square().sum().backward()
    opt.step()
    opt.synchronize()
    assert torch.equal(first, before), "a stack that no rank used moved"
    assert opt._by_name["stacks.0"].num_steps == 1
    assert opt._by_name["stacks.1"].num_steps == 2
    opt.close()


def test_a_stack_that_ranks_do_not_use() -> None:
    run_ranks(2, _stack_unused_on_one_rank_then_on_all)
