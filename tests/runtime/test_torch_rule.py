"""Whole-matrix optimizers of torch and other libraries, and the Muon family, on ranks: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_optimizer import SOAP, ScheduleFreeSGD  # type: ignore[import-untyped]
from ranks import run_ranks
from torch import Tensor, nn

from freehold import AdaMuon, Group, LayerwiseOptimizer, Muon, NorMuon, TorchRule
from freehold.errors import FreeholdError, RuleError
from freehold.rules import Rule

SHAPES = ((16, 24), (5, 8, 12), (24, 16), (3, 12, 8), (16, 24), (1, 9))
NUM_STEPS = 4

RULES: dict[str, Rule] = {
    "torch-muon": TorchRule(torch.optim.Muon, lr=0.05),
    "soap": TorchRule(SOAP, lr=0.01, precondition_frequency=2),
    "schedule-free": TorchRule(ScheduleFreeSGD, lr=0.05, warmup_steps=2, foreach=False),
    "normuon": NorMuon(lr=0.05),
    "adamuon": AdaMuon(lr=0.05),
    "muon-cautious": Muon(lr=0.05, cautious=True),
}


class Stacks(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.params = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES)


def gradients(step: int) -> list[Tensor]:
    """The averaged gradients of a step: small integers over 8, whose sums over ranks are exact."""
    generator = torch.Generator().manual_seed(70 + step)
    return [torch.randint(-16, 17, shape, generator=generator) / 8.0 for shape in SHAPES]


def trained(rule: Rule, bucket_numel: int | None, unused: dict[int, int], **options: Any) -> tuple[Any, Any]:
    """The model's params after some steps; ``unused`` maps a step to a param that gets no gradient in it."""
    model = Stacks()
    opt = LayerwiseOptimizer(model, matrix=rule, elementwise=None, bucket_numel=bucket_numel, **options)
    for step in range(NUM_STEPS):
        grads = gradients(step)
        used = [i for i in range(len(SHAPES)) if unused.get(step) != i]
        sum((model.params[i] * grads[i]).sum() for i in used).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    values = [p.detach().clone() for p in model.params]
    kept = [dict(state) for bucket in opt._buckets for state in bucket.memory.per_matrix]
    opt.close()
    return values, kept


def _on_ranks(name: str, bucket_numel: int | None, unused: dict[int, int]) -> list[Tensor]:
    values, _ = trained(RULES[name], bucket_numel, unused)
    return values


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize(("num_ranks", "bucket_numel"), [(2, 400), (3, None)])
def test_ranks_have_the_bits_of_one_process(name: str, num_ranks: int, bucket_numel: int | None) -> None:
    unused = {1: 0, 2: 3}
    expected, _ = trained(RULES[name], None, unused)
    for found in run_ranks(num_ranks, _on_ranks, name, bucket_numel, unused):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "optimizer_class", "kwargs"),
    [
        ("torch-muon", torch.optim.Muon, {"lr": 0.05}),
        ("soap", SOAP, {"lr": 0.01, "precondition_frequency": 2}),
        ("schedule-free", ScheduleFreeSGD, {"lr": 0.05, "warmup_steps": 2, "foreach": False}),
    ],
)
def test_one_process_has_the_bits_of_the_optimizer_itself(name: str, optimizer_class: Any, kwargs: Any) -> None:
    values, _ = trained(RULES[name], 400, {})
    params = [
        nn.Parameter(m.clone()) for p in Stacks().params for m in (p.detach() if p.ndim == 3 else p.detach()[None])
    ]
    optimizer = optimizer_class(params, **kwargs)
    for step in range(NUM_STEPS):
        grads = [m for g in gradients(step) for m in (g if g.ndim == 3 else g[None])]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    found = [m for p in values for m in (p if p.ndim == 3 else p[None])]
    for ours, theirs in zip(found, params, strict=True):
        assert torch.equal(ours, theirs.detach())


def _state_extents() -> tuple[int, int, int]:
    model = Stacks()
    opt = LayerwiseOptimizer(model, matrix=NorMuon(lr=0.1), elementwise=None, bucket_numel=None)
    rows = sum(t.numel() for b in opt._buckets for t in b.memory.row_state.values())
    owned = sum(
        slot.numel // b_param.matrix_shape[1]
        for b in opt._buckets
        for slot in b.owned
        for b_param in b.params
        if b_param.name == slot.name
    )
    opt.close()
    return rows, owned, dist.get_rank()


def test_state_by_row_covers_the_owned_rows_alone() -> None:
    found = run_ranks(2, _state_extents)
    assert all(rows == owned for rows, owned, _ in found)
    assert sum(rows for rows, _, _ in found) == sum(torch.Size(shape[:-1]).numel() for shape in SHAPES)


def test_masters_of_low_precision_weights_are_what_an_optimizer_sees() -> None:
    model = Stacks(torch.bfloat16)
    opt = LayerwiseOptimizer(model, matrix=TorchRule(torch.optim.Muon, lr=0.05), elementwise=None)
    sum((p.float() * g).sum() for p, g in zip(model.params, gradients(0), strict=True)).backward()
    opt.step()
    states = [state for bucket in opt._buckets for state in bucket.memory.per_matrix]
    assert len(states) == sum(shape[0] if len(shape) == 3 else 1 for shape in SHAPES)
    assert {state["momentum_buffer"].dtype for state in states} == {torch.float32}
    assert opt.memory().state_bytes == 4 * sum(torch.Size(shape).numel() for shape in SHAPES)


def fused_and_separate(split: Any, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A fused weight under ``Group(split=...)``, and its parts as params of their own, after the same steps."""
    weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(5))
    fused = nn.ParameterDict({"qkv": nn.Parameter(weight.clone()), "other": nn.Parameter(torch.ones(24, 24))})
    parts = nn.ParameterDict({f"part{i}": nn.Parameter(p.clone()) for i, p in enumerate(weight.split(rows))})
    together = LayerwiseOptimizer(fused, matrix=Muon(lr=0.1), elementwise=None, groups=[Group("qkv", split=split)])
    separate = LayerwiseOptimizer(parts, matrix=Muon(lr=0.1), elementwise=None)
    for step in range(3):
        grad = torch.randint(-9, 10, (16, 24), generator=torch.Generator().manual_seed(step)).float()
        (fused["qkv"] * grad).sum().backward()
        sum((p * g).sum() for p, g in zip(parts.values(), grad.split(rows), strict=True)).backward()
        for opt in (together, separate):
            opt.step()
            opt.zero_grad()
    for opt in (together, separate):
        opt.synchronize()
    result = fused["qkv"].detach().clone(), torch.cat([p.detach() for p in parts.values()])
    together.close()
    separate.close()
    return result


@pytest.mark.parametrize(("split", "rows"), [((8, 4, 4), (8, 4, 4)), (4, (4, 4, 4, 4))])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_group_splits_a_fused_weight(num_ranks: int, split: Any, rows: tuple[int, ...]) -> None:
    for fused, separate in run_ranks(num_ranks, fused_and_separate, split, rows):
        assert torch.equal(fused, separate)


def test_a_split_that_fits_no_param_is_refused_at_wrapping_with_every_name() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(6, 4)), "b": nn.Parameter(torch.ones(2, 8, 4))})
    with pytest.raises(RuleError, match="param 'a': split=4 does not divide 6 rows"):
        LayerwiseOptimizer(model, matrix=Muon(split=4), elementwise=None)
    with pytest.raises(RuleError, match=r"param 'a': split=\(4, 4\) has 8 rows in all, the matrix has 6"):
        LayerwiseOptimizer(model, matrix=Muon(), elementwise=None, groups=[Group("*", split=(4, 4))])
    conv = nn.Conv2d(2, 6, 3, bias=False)
    opt = LayerwiseOptimizer(conv, matrix=Muon(split=3), elementwise=None)
    conv(torch.ones(1, 2, 5, 5)).sum().backward()
    opt.step()
    opt.close()


def _divergent_options() -> str:
    try:
        trained(Muon(lr_scale=1.0 + dist.get_rank()), None, {})
    except FreeholdError as error:
        return str(error)
    return "no error"


def test_options_of_the_family_must_agree_over_ranks() -> None:
    assert all("param groups" in text for text in run_ranks(2, _divergent_options))
