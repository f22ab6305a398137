"""Sub-groups, groups of one, and ranks that own nothing."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference import Recipe, assert_equal_params, assert_equal_ranks, full_grads
from torch import Tensor, nn

from freehold import LayerwiseOptimizer


def _plain_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _train(group: Any, num_steps: int = 4) -> list[Tensor]:
    """Data and initial weights by group rank, so that groups of one size train alike wherever they lie."""
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(33, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 16, bias=False), nn.Linear(16, 3)
    )
    opt = LayerwiseOptimizer(model, **Recipe().rules(), process_group=group, bucket_numel=300)
    generator = torch.Generator().manual_seed(40 + rank)
    for step in range(num_steps):
        with opt.no_sync():
            models.loss_of(model, models.batch("mlp", generator)).backward()
        models.loss_of(model, models.batch("mlp", generator)).backward()
        opt.clip_grad_norm_(0.5 + step)
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    opt.close()
    return [p.detach().clone() for p in model.parameters()]


def _in_subgroups() -> list[Tensor]:
    inner = dist.new_group([1, 2])
    outer = dist.new_group([0, 3])
    return _train(inner if dist.get_rank() in (1, 2) else outer)


def _in_world() -> list[Tensor]:
    return _train(dist.group.WORLD)


def test_a_subgroup_trains_like_a_world_of_its_size() -> None:
    """[1, 2] and [0, 3] of four ranks, at the same time; group ranks are not global ranks."""
    whole = run_ranks(2, _in_world)
    parts = run_ranks(4, _in_subgroups)
    for rank, part in enumerate(parts):
        for p, q in zip(part, whole[0], strict=True):
            assert torch.equal(p, q), f"global rank {rank}"


def _group_of_one(kind: str) -> None:
    """Bit for bit torch.optim.Muon and torch.optim.AdamW."""
    recipe = Recipe()
    model, plain = models.make(kind), models.make(kind)
    opt = LayerwiseOptimizer(model, **recipe.rules(), bucket_numel=1500)
    optimizers = recipe.torch_optimizers(plain.named_parameters())
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        for micro in range(1 + step % 2):
            inputs = models.batch(kind, generator)
            if micro < step % 2:
                with opt.no_sync():
                    models.loss_of(model, inputs).backward()
            else:
                models.loss_of(model, inputs).backward()
            models.loss_of(plain, inputs).backward()
        if step >= 3:
            norm = opt.clip_grad_norm_(0.1)
            grads = [p.grad for p in plain.parameters()]
            theirs = nn.utils.get_total_norm(grads)
            assert abs(norm - theirs) <= 1e-6 * theirs
            nn.utils.clip_grads_with_norm_(plain.parameters(), 0.1, norm)
        opt.step()
        opt.zero_grad()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_params(model, plain, f"{step=}")
    opt.close()


@pytest.mark.parametrize("kind", ["mlp", "gpt", "gpt_tied"])
def test_alone_without_a_process_group(kind: str) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _group_of_one(kind)
    torch.set_num_threads(num_threads)


def test_alone_in_a_process_group_of_one() -> None:
    run_ranks(1, _group_of_one, "gpt_tied")


SMALL: dict[str, tuple[int, ...]] = {"one matrix": (8, 8), "one vector": (3,), "one scalar": ()}


def _less_than_ranks(name: str) -> int:
    torch.manual_seed(0)
    model = nn.ParameterDict({"w": torch.randn(SMALL[name])})
    w = model["w"]
    is_matrix = w.ndim == 2
    reference = nn.Parameter(w.detach().clone())
    recipe = Recipe()
    rules = recipe.rules()
    opt = LayerwiseOptimizer(
        model,
        matrix=rules["matrix"] if is_matrix else None,
        elementwise=None if is_matrix else rules["elementwise"],
        bucket_numel=None,
    )
    (optimizer,) = recipe.torch_optimizers([("w", reference)])
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        generators = [torch.Generator().manual_seed(10 * step + r) for r in range(num_ranks)]
        given = [torch.randn(SMALL[name], generator=g) for g in generators]
        (w * given[rank]).sum().backward()
        norm = opt.clip_grad_norm_(0.7)
        grads = full_grads(opt)
        reference.grad = grads["w"].clone()
        mean = _plain_sum(given) / num_ranks
        torch.testing.assert_close(norm, mean.norm(), rtol=1e-6, atol=0)
        torch.testing.assert_close(reference.grad, mean * min(1.0, 0.7 / (mean.norm() + 1e-6)), rtol=1e-6, atol=1e-8)
        opt.step()
        opt.zero_grad()
        scheduler.step()
        optimizer.step()
        assert torch.equal(w, reference), f"{step=}"
        assert_equal_ranks(model)
    held = opt.memory().state_bytes
    owned = sum(len(bucket.owned) for bucket in opt._buckets)
    assert (held == 0) == (owned == 0)
    opt.close()
    return owned


@pytest.mark.parametrize("name", SMALL)
def test_ranks_that_own_nothing(name: str) -> None:
    assert sorted(run_ranks(4, _less_than_ranks, name)) == [0, 0, 0, 1]
