"""What Muon, NorMuon and AdaMuon have in common: splits, scales, decay, and what they do to odd input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freehold.errors import RuleError
from freehold.rules import AdaMuon, AdamW, Block, Muon, NorMuon, Rule
from freehold.rules.matrices import batches

FAMILY = pytest.mark.parametrize("make", [Muon, NorMuon, AdaMuon], ids=lambda make: make.__name__)
SPLITS = pytest.mark.parametrize(
    ("split", "rows"),
    [((8, 4, 4), (8, 4, 4)), (2, (8, 8)), (4, (4, 4, 4, 4)), ((3, 13), (3, 13)), (16, (1,) * 16)],
    ids=str,
)


def after(flat_params: Any, rule: Rule, params: list[Tensor], num_steps: int = 3) -> Any:
    """Updated by gradients that depend on the params' elements alone, however they are cut."""
    flat = flat_params.of(rule, params)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, num_steps + 1):
        numel = sum(p.numel() for p in params)
        grads = torch.randn(numel, generator=generator).split([p.numel() for p in params])
        flat.update([g.view(p.shape) for g, p in zip(grads, params, strict=True)], step)
    return flat


@FAMILY
@SPLITS
def test_a_split_param_has_the_bits_of_separate_params(
    make: Callable[..., Rule], split: Any, rows: tuple[int, ...], flat_params: Any
) -> None:
    fused = torch.randn(16, 24)
    options = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "original"}
    together = after(flat_params, make(split=split, **options), [fused])
    separate = after(flat_params, make(**options), list(fused.split(rows)))
    assert torch.equal(together.split(together.param)[0], torch.cat(separate.split(separate.param)))
    for name, tensor in together.state.items():
        assert torch.equal(together.split(tensor)[0], torch.cat(separate.split(separate.state[name]))), name
    for name, tensor in together.row_state.items():
        assert torch.equal(tensor, separate.row_state[name]), name


@FAMILY
def test_a_split_stack_is_split_slice_by_slice(make: Callable[..., Rule], flat_params: Any) -> None:
    stack = torch.randn(3, 16, 24)
    together = after(flat_params, make(lr=0.1, split=2), [stack])
    separate = after(flat_params, make(lr=0.1), [half for matrix in stack for half in matrix.split(8)])
    assert torch.equal(together.split(together.param)[0].view(6, 8, 24), torch.stack(separate.split(separate.param)))


@FAMILY
def test_each_part_of_a_split_has_its_scale(make: Callable[..., Rule], flat_params: Any) -> None:
    fused = torch.randn(16, 24)
    scaled = after(flat_params, make(lr=0.1, weight_decay=0.0, split=2, split_scale=(1.0, 0.5)), [fused], 1)
    plain = after(flat_params, make(lr=0.1, weight_decay=0.0, split=2), [fused], 1)
    moves = [flat.split(flat.param)[0] - fused for flat in (scaled, plain)]
    assert torch.equal(moves[0][:8], moves[1][:8])
    torch.testing.assert_close(moves[0][8:], moves[1][8:] * 0.5, rtol=1e-4, atol=1e-6)


def test_equal_parts_of_a_split_are_one_batch() -> None:
    blocks = (Block(offset=0, shape=(12, 8)), Block(offset=128, shape=(12, 8)))
    found = [(b.offset, b.num_matrices, b.num_rows, b.first_row) for b in batches(blocks, 3)]
    assert found == [(0, 3, 4, 0), (128, 3, 4, 12)]
    assert [b.num_matrices for b in batches(blocks, 3, (1.0, 1.0, 2.0))] == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": 5}, "param 'qkv': split=5 does not divide 12 rows"),
        ({"split": (4, 4)}, r"split=\(4, 4\) has 8 rows in all, the matrix has 12"),
        ({"split": 3, "split_scale": (1.0, 1.0)}, "split_scale has 2 values, split=3 makes 3 parts"),
        ({"split_scale": (1.0,)}, "split_scale has 1 values, split=None makes 1 parts"),
    ],
)
@FAMILY
def test_a_split_that_does_not_fit_is_refused(
    make: Callable[..., Rule], options: dict[str, Any], message: str, flat_params: Any
) -> None:
    rule = make(**options)
    with pytest.raises(RuleError, match=message):
        rule.check_param("qkv", (12, 8), rule.defaults())
    make(split=3, split_scale=(1.0, 0.0, 2.0)).check_param("qkv", (12, 8), make(split=3).defaults())


@pytest.mark.parametrize("make", [Muon, NorMuon, AdaMuon, AdamW], ids=lambda make: make.__name__)
def test_lr_scale_multiplies_lr(make: Callable[..., Rule], flat_params: Any) -> None:
    param = torch.randn(8, 8)
    scaled = after(flat_params, make(lr=0.25, lr_scale=0.5, weight_decay=0.3), [param])
    plain = after(flat_params, make(lr=0.125, weight_decay=0.3), [param])
    assert torch.equal(scaled.param, plain.param)


@FAMILY
def test_cautious_decay_acts_only_where_the_update_shrinks_the_weight(
    make: Callable[..., Rule], flat_params: Any
) -> None:
    param = torch.randn(12, 20)
    lr, weight_decay = 0.01, 0.5
    plain = after(flat_params, make(lr=lr, weight_decay=0.0), [param], 1)
    cautious = after(flat_params, make(lr=lr, weight_decay=weight_decay, cautious=True), [param], 1)
    update = param - plain.split(plain.param)[0]
    decayed = torch.where(update * param >= 0, param * (1 - lr * weight_decay), param)
    torch.testing.assert_close(cautious.split(cautious.param)[0], decayed - update, rtol=1e-5, atol=1e-6)
    assert 0.2 < (update * param >= 0).float().mean() < 0.8
    without = after(flat_params, make(lr=lr, weight_decay=0.0, cautious=True), [param], 1)
    assert torch.equal(without.param, plain.param)


@pytest.mark.parametrize(("mode", "scale"), [("spectral", math.sqrt(8 / 32)), ("original", 1.0), (None, 1.0)])
def test_adjust_lr_fn_scales_the_update(mode: str | None, scale: float, flat_params: Any) -> None:
    grad = torch.randn(8, 32)
    flat = flat_params.of(Muon(lr=0.1, weight_decay=0.0, adjust_lr_fn=mode), [torch.zeros(8, 32)])
    flat.update([grad], 1)
    torch.testing.assert_close(
        torch.linalg.matrix_norm(flat.split(flat.param)[0], ord=2), torch.tensor(0.1 * scale), rtol=0.25, atol=0
    )


@pytest.mark.parametrize("make", [NorMuon, AdaMuon], ids=lambda make: make.__name__)
def test_evened_updates_have_the_rms_of_adamw(make: Callable[..., Rule], flat_params: Any) -> None:
    for shape in ((8, 32), (64, 16), (1, 9)):
        flat = after(flat_params, make(lr=0.1, weight_decay=0.0), [torch.zeros(shape)], 1)
        rms = flat.split(flat.param)[0].square().mean().sqrt()
        torch.testing.assert_close(rms, torch.tensor(0.02), rtol=1e-4, atol=0)


def test_normuon_evens_out_rows(flat_params: Any) -> None:
    scales = torch.logspace(0, -2, 16).unsqueeze(1)
    flat = flat_params.of(NorMuon(lr=0.1, weight_decay=0.0), [torch.zeros(16, 8)])
    flat.update([torch.randn(16, 8) * scales], 1)
    rms = flat.split(flat.param)[0].square().mean(1).sqrt()
    torch.testing.assert_close(rms, torch.full((16,), 0.02), rtol=1e-3, atol=0)


@FAMILY
@pytest.mark.parametrize("method", ["standard", "gram", "auto"])
def test_b07_no_gradient_makes_nan(make: Callable[..., Rule], method: str, flat_params: Any) -> None:
    shapes = ((1, 9), (9, 1), (16, 24), (3, 8, 8))
    for scale in (0.0, 1e-45, 1e-30, 1.0, 1e30):
        flat = flat_params.of(make(lr=0.1, method=method), [torch.randn(shape) for shape in shapes])
        for step in (1, 2):
            grads = [torch.ones(shape) * scale for shape in shapes]
            grads[2][0] = 0.0
            flat.update(grads, step)
            for tensor in (flat.param, *flat.kept().values()):
                assert tensor.isfinite().all()


@FAMILY
@pytest.mark.parametrize("method", ["gram", "auto"])
def test_b23_methods_take_stacks_as_separate_matrices(make: Callable[..., Rule], method: str, flat_params: Any) -> None:
    stack = torch.randn(4, 12, 20)
    together = after(flat_params, make(lr=0.1, method=method), [stack])
    separate = after(flat_params, make(lr=0.1, method=method), list(stack))
    moves = [together.split(together.param)[0] - stack, torch.stack(separate.split(separate.param)) - stack]
    assert (moves[0] - moves[1]).norm() < 0.03 * moves[1].norm()


@FAMILY
@pytest.mark.parametrize("method", ["standard", "gram", "auto"])
def test_b10_clipping_changes_nothing(make: Callable[..., Rule], method: str, flat_params: Any) -> None:
    grad = torch.randn(24, 40)
    moves: list[Tensor] = []
    for factor in (1.0, 2.0**-9):
        flat = flat_params.of(make(lr=0.1, weight_decay=0.0, method=method), [torch.zeros(24, 40)])
        flat.update([grad * factor], 1)
        moves.append(flat.param)
    assert torch.equal(moves[0], moves[1])


def test_named_coefficient_sets_reach_the_update(flat_params: Any) -> None:
    grad = torch.randn(12, 40)
    for name, num_steps in (("polar_express", 8), ("exact", 14)):
        rule = Muon(lr=1.0, weight_decay=0.0, ns_coefficients=name, ns_steps=num_steps, ns_dtype="float64")
        flat = flat_params.of(rule, [torch.zeros(12, 40)])
        flat.update([grad], 1)
        values = torch.linalg.svdvals(flat.split(flat.param)[0])
        torch.testing.assert_close(values, torch.ones(12), rtol=0, atol=1e-4)
