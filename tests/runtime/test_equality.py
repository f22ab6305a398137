"""Trained on several ranks, the model has the bits that torch's own optimizers give it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference import (
    DDPReference,
    MasterReference,
    Recipe,
    assert_equal_params,
    assert_equal_ranks,
    full_grads,
)

from freehold import LayerwiseOptimizer

NUM_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One training run.

    Attributes:
        model: A name of ``models.make``.
        recipe: Options of the rules.
        window: Micro-batches a step.
        max_norm: Clip to this norm.
        bucket_numel: As in ``LayerwiseOptimizer``.
        policy: As in ``LayerwiseOptimizer``.
        num_steps: Optimizer steps.
        dtype: Of the params.
        reduce_dtype: Of the reduction.
        grad_memory: As in ``LayerwiseOptimizer``.
        by_name: Give freehold ``model.named_parameters()`` instead of the model.
    """

    model: str = "mlp"
    recipe: Recipe = field(default_factory=Recipe)
    window: int = 1
    max_norm: float | None = None
    bucket_numel: int | str | None = 1500
    policy: str = "packed"
    num_steps: int = NUM_STEPS
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    by_name: bool = False
    grad_memory: str = "full"

    def __str__(self) -> str:
        r = self.recipe
        clip = "" if self.max_norm is None else f"-clip{self.max_norm}"
        return (
            f"{self.model}-wd{r.weight_decay}-nesterov{int(r.nesterov)}-window{self.window}{clip}"
            f"-{self.bucket_numel}-{self.policy}-{self.grad_memory}"
        )


def _optimizer(model: torch.nn.Module, s: Setting) -> LayerwiseOptimizer:
    return LayerwiseOptimizer(
        model.named_parameters() if s.by_name else model,
        **s.recipe.rules(),
        bucket_numel=s.bucket_numel,
        policy=s.policy,
        reduce_dtype=s.reduce_dtype,
        grad_memory=s.grad_memory,
    )


def _backward(opt: LayerwiseOptimizer, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, sync: bool) -> None:
    with contextlib.nullcontext() if sync else opt.no_sync():
        models.loss_of(model, inputs).backward()


def _generator(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + rank)


def _against_ddp(s: Setting) -> int:
    model = models.make(s.model).to(s.dtype)
    reference = DDPReference(model, s.recipe)
    opt = _optimizer(model, s)
    generator = _generator(dist.get_rank())
    for step in range(s.num_steps):
        for micro in range(s.window):
            inputs = models.batch(s.model, generator, s.dtype)
            _backward(opt, model, inputs, sync=micro == s.window - 1)
            reference.backward(inputs, sync=micro == s.window - 1)
        if s.max_norm is not None:
            norm = opt.clip_grad_norm_(s.max_norm)
            theirs = torch.nn.utils.get_total_norm([p.grad for p in reference.model.parameters()])
            assert abs(norm - theirs) <= 1e-6 * theirs, f"{step=}: {norm=} {theirs=}"
            reference.clip(norm, s.max_norm)
        opt.step()
        opt.zero_grad()
        reference.step()
        assert_equal_params(model, reference.model, f"{step=}")
        assert_equal_ranks(model, f"{step=}")
    num_buckets = len(opt.layout.buckets)
    opt.close()
    return num_buckets


RECIPES = [
    Recipe(weight_decay=wd, nesterov=nesterov)
    for wd, nesterov in ((0.0, True), (0.1, True), (0.0, False), (0.1, False))
]
MODELS = ("mlp", "gpt", "gpt_tied")


# The MLP in every combination; of the GPTs' enough that each option meets each other one, the rest is slow.
QUICK_OF_GPT = {(0.0, True, 1), (0.1, False, 1), (0.1, True, 3), (0.0, False, 3)}


def _combinations() -> Iterator[Any]:
    for model, recipe, window in itertools.product(MODELS, RECIPES, (1, 3)):
        quick = model == "mlp" or (recipe.weight_decay, recipe.nesterov, window) in QUICK_OF_GPT
        s = Setting(model=model, recipe=recipe, window=window, bucket_numel=3000 if model != "mlp" else 1500)
        yield pytest.param(s, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("s", list(_combinations()), ids=str)
def test_two_ranks_have_the_bits_of_ddp(s: Setting) -> None:
    num_buckets = run_ranks(2, _against_ddp, s)
    assert min(num_buckets) >= (2 if s.model == "mlp" else 4), "too few buckets to test anything between them"


@pytest.mark.parametrize(
    "s",
    [
        Setting(model=model, window=window, max_norm=max_norm)
        for model, window, max_norm in (("mlp", 1, 0.05), ("gpt", 3, 0.1), ("gpt_tied", 1, 0.1), ("mlp", 3, 1e6))
    ],
    ids=str,
)
def test_two_ranks_have_the_bits_of_ddp_with_clipping(s: Setting) -> None:
    run_ranks(2, _against_ddp, s)


@pytest.mark.parametrize(
    "s",
    [
        Setting(model=model, bucket_numel=bucket_numel, policy=policy, num_steps=6, window=2)
        for model, bucket_numel, policy in (
            ("gpt", "default", "threshold"),
            ("gpt", 500, "absorb"),
            ("gpt_tied", None, "ns_cost"),
            ("mlp", None, "threshold"),
            ("mlp", 1, "ns_cost"),
            ("gpt_tied", "default", "absorb"),
            ("gpt", 3000, "packed"),
        )
    ],
    ids=str,
)
def test_no_layout_changes_a_bit(s: Setting) -> None:
    run_ranks(2, _against_ddp, s)


@pytest.mark.parametrize(
    "s",
    [
        Setting(model="mlp", bucket_numel=1, grad_memory="sharded"),
        Setting(model="gpt", bucket_numel=3000, window=3, max_norm=0.1, num_steps=8, grad_memory="sharded"),
        Setting(model="gpt_tied", bucket_numel=500, num_steps=8, grad_memory="sharded"),
    ],
    ids=str,
)
def test_sharded_gradients_change_no_bit(s: Setting) -> None:
    run_ranks(2, _against_ddp, s)


def test_named_params_have_the_bits_of_ddp() -> None:
    """No module, so nothing to hook: step() itself finishes the gathers."""
    run_ranks(2, _against_ddp, Setting(model="mlp", by_name=True, num_steps=6, window=2))


def test_float64_has_the_bits_of_ddp() -> None:
    run_ranks(2, _against_ddp, Setting(model="mlp", dtype=torch.float64, num_steps=6, window=2))


def _fed_with_own_grads(s: Setting) -> list[str]:
    """Averaged gradients against DDP's, then the reference rules fed with ours."""
    model = models.make(s.model)
    reference = DDPReference(model, s.recipe)
    opt = _optimizer(model, s)
    generator = _generator(dist.get_rank())
    for step in range(s.num_steps):
        for micro in range(s.window):
            inputs = models.batch(s.model, generator)
            _backward(opt, model, inputs, sync=micro == s.window - 1)
            reference.backward(inputs, sync=micro == s.window - 1)
        opt.clip_grad_norm_(1e30)
        grads = full_grads(opt)
        for name, p in reference.model.named_parameters():
            error, size = (p.grad - grads[name]).norm(), p.grad.norm()
            assert error <= 1e-6 * size, f"{step=} {name}: the averaged gradient is off by {error / size}"
            p.grad.copy_(grads[name])
        opt.step()
        opt.zero_grad()
        reference.step()
        assert_equal_params(model, reference.model, f"{step=}")
        assert_equal_ranks(model, f"{step=}")
    owners = [slot.name for bucket in opt.layout.buckets for slot in bucket.slots_of_rank(dist.get_rank())]
    opt.close()
    return owners


@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize(
    "s",
    [
        Setting(model="mlp", policy="threshold", num_steps=8),
        Setting(model="gpt", window=2, bucket_numel="default", num_steps=8),
        Setting(model="gpt_tied", bucket_numel=3000, policy="absorb", num_steps=8),
    ],
    ids=str,
)
def test_three_and_four_ranks(num_ranks: int, s: Setting) -> None:
    owned = run_ranks(num_ranks, _fed_with_own_grads, s)
    assert sum(1 for names in owned if names) >= 2, "one rank owns everything: nothing is tested"


def _against_masters(s: Setting) -> None:
    model = models.make(s.model).to(s.dtype)
    num_ranks = dist.get_world_size()
    reference = MasterReference(model, s.recipe, num_ranks, s.reduce_dtype)
    opt = _optimizer(model, s)
    generators = [_generator(rank) for rank in range(num_ranks)]
    for step in range(s.num_steps):
        for micro in range(s.window):
            inputs = [models.batch(s.model, g, s.dtype) for g in generators]
            _backward(opt, model, inputs[dist.get_rank()], sync=micro == s.window - 1)
            for rank in range(num_ranks):
                reference.backward(rank, inputs[rank])
        opt.step()
        opt.zero_grad()
        reference.step()
        assert_equal_params(model, reference.model, f"{step=}")
        assert_equal_ranks(model, f"{step=}")
    _assert_equal_masters(opt, reference)
    opt.close()


def _assert_equal_masters(opt: LayerwiseOptimizer, reference: MasterReference) -> None:
    for bucket in opt._buckets:
        assert bucket.memory.master.dtype == torch.float32
        for slot in bucket.owned:
            ours = bucket.memory.master[slot.offset : slot.offset + slot.numel]
            theirs = reference.masters[slot.name].detach().flatten()[slot.start : slot.stop]
            assert torch.equal(ours, theirs), f"master of {slot.name}"


@pytest.mark.parametrize(
    ("num_ranks", "s"),
    [
        (2, Setting(model="mlp", dtype=torch.bfloat16)),
        (2, Setting(model="gpt_tied", dtype=torch.bfloat16, window=3, bucket_numel=3000)),
        (3, Setting(model="gpt", dtype=torch.bfloat16, num_steps=8, recipe=Recipe(nesterov=False))),
        (2, Setting(model="mlp", dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, window=2, num_steps=8)),
        (2, Setting(model="mlp", dtype=torch.float16, num_steps=8, window=2)),
        (3, Setting(model="gpt", dtype=torch.bfloat16, num_steps=6, window=2, grad_memory="sharded")),
    ],
    ids=lambda value: f"{value}-{value.dtype}-{value.reduce_dtype}" if isinstance(value, Setting) else str(value),
)
def test_low_precision_equals_one_process_with_fp32_masters(num_ranks: int, s: Setting) -> None:
    run_ranks(num_ranks, _against_masters, s)
