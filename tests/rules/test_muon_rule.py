from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from freehold.errors import RuleError
from freehold.rules import Block, Muon, Span, newton_schulz
from freehold.rules.matrices import batches
from freehold.rules.polar.coefficients import schedule_of
from freehold.rules.polar.products import Workspace
from freehold.rules.polar.variants import Variant, pieces


def updated(flat_params: Any, rule: Muon, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    flat = flat_params.of(rule, params)
    for step in (1, 2):
        flat.update(grads, step)
    return flat.split(flat.param)


@pytest.mark.parametrize("shape", [(4, 8, 16), (3, 16, 8), (5, 7, 13)], ids=str)
@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_b23_a_stack_is_updated_as_separate_matrices(
    shape: tuple[int, int, int], adjust_lr_fn: str | None, flat_params: Any
) -> None:
    rule = Muon(lr=0.1, adjust_lr_fn=adjust_lr_fn)
    stack, grad = torch.randn(shape), torch.randn(shape)
    (together,) = updated(flat_params, rule, [stack], [grad])
    separate = updated(flat_params, rule, list(stack), list(grad))
    assert torch.equal(together, torch.stack(separate))
    as_one_matrix = updated(flat_params, rule, [stack.flatten(0, 1)], [grad.flatten(0, 1)])
    assert (together.flatten(0, 1) - as_one_matrix[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((16, 105), 1.0), ((64, 9), math.sqrt(64 / 9)), ((8, 16), 1.0), ((16, 8), math.sqrt(2))],
)
def test_b23_lr_is_scaled_by_the_matrix_that_is_given(shape: tuple[int, int], scale: float, flat_params: Any) -> None:
    grad = torch.randn(shape)
    flat = flat_params.of(Muon(lr=0.5, weight_decay=0.0, momentum=0.0, nesterov=False), [torch.zeros(shape)])
    flat.update([grad], 1)
    expected = newton_schulz(grad).float() * -(0.5 * scale)
    torch.testing.assert_close(flat.split(flat.param)[0], expected, rtol=1e-6, atol=0)


def test_b23_two_params_of_one_shape_are_not_mixed(flat_params: Any) -> None:
    params, grads = [torch.randn(6, 10) for _ in range(3)], [torch.randn(6, 10) for _ in range(3)]
    together = updated(flat_params, Muon(lr=0.1), params, grads)
    for index in range(3):
        (alone,) = updated(flat_params, Muon(lr=0.1), [params[index]], [grads[index]])
        assert torch.equal(together[index], alone)


def test_b07_a_zero_gradient_is_decay_only(flat_params: Any) -> None:
    param = torch.randn(8, 4)
    flat = flat_params.of(Muon(lr=0.1, weight_decay=0.5), [param])
    flat.update([torch.zeros(8, 4)], 1)
    assert torch.equal(flat.split(flat.param)[0], param * (1 - 0.1 * 0.5))


def test_b07_tiny_gradients_move_weights_as_far_as_large_ones(flat_params: Any) -> None:
    grad = torch.randn(16, 24)
    moves: list[Tensor] = []
    for scale in (1.0, 2.0**-60, 2.0**60):
        flat = flat_params.of(Muon(lr=0.1, weight_decay=0.0), [torch.zeros(16, 24)])
        flat.update([grad * scale], 1)
        moves.append(flat.param)
    assert torch.equal(moves[1], moves[0])
    assert torch.equal(moves[2], moves[0])


def test_b10_clipping_the_gradient_does_not_change_the_first_step(flat_params: Any) -> None:
    grads = [torch.randn(128, 128) * 1e-2 for _ in range(2)]
    total = torch.stack([grad.norm() for grad in grads]).norm()
    norms: list[Tensor] = []
    for max_norm in (None, 1.0, 1e-3):
        factor = 1.0 if max_norm is None else min(1.0, max_norm / float(total))
        flat = flat_params.of(Muon(lr=0.02, weight_decay=0.0), [torch.zeros(128, 128) for _ in grads])
        flat.update([grad * factor for grad in grads], 1)
        norms.append(flat.param.norm())
    # bfloat16 rounds the norm that is divided by to 8 bits, and other factors than 2**k move that
    torch.testing.assert_close(torch.stack(norms[1:]), norms[0].expand(2), rtol=2e-3, atol=0)


def test_without_nesterov_the_momentum_buffer_is_not_normalised(flat_params: Any) -> None:
    grad = torch.randn(5, 6)
    flat = flat_params.of(Muon(nesterov=False, momentum=0.5), [torch.zeros(5, 6)])
    flat.update([grad], 1)
    assert torch.equal(flat.split(flat.state["momentum_buffer"])[0], grad * 0.5)


def batch_shapes(*blocks: Block) -> list[tuple[int, int, int]]:
    """``(offset, matrices, stride)`` of each batch."""
    return [(b.offset, b.num_matrices, b.stride) for b in batches(blocks)]


def test_equal_shapes_at_equal_distances_form_one_batch() -> None:
    row = [Block(offset=128 * index, shape=(9, 11)) for index in range(3)]  # 99 elements, padded to 128
    assert batch_shapes(*row) == [(0, 3, 128)]
    assert batch_shapes(*row[:2], Block(offset=512, shape=(9, 11))) == [(0, 2, 128), (512, 1, 99)]
    assert batch_shapes(*row, Block(offset=384, shape=(11, 9))) == [(0, 3, 128), (384, 1, 99)]
    assert batch_shapes(Block(offset=64, shape=(4, 8, 8)), Block(offset=320, shape=(8, 8))) == [(64, 5, 64)]
    assert batch_shapes(Block(offset=0, shape=(3, 7, 7)), Block(offset=192, shape=(7, 7))) == [
        (0, 3, 49),
        (192, 1, 49),
    ]


@pytest.mark.parametrize("max_batch_bytes", [1, 3 * 64 * 2, 10**9])
def test_batches_are_bounded_in_memory(max_batch_bytes: int) -> None:
    stack = torch.randn(7, 8, 8)
    variant = Variant(form="gram", dtype=torch.bfloat16, batched=True)
    schedule = schedule_of("jordan", 5)
    found = [(a, b) for a, b, _ in pieces(stack, variant, schedule, Workspace(), max_batch_bytes=max_batch_bytes)]
    per_piece = max(1, min(7, max_batch_bytes // 128))
    assert [b - a for a, b in found] == [min(per_piece, 7 - a) for a in range(0, 7, per_piece)]


def test_a_block_that_is_no_matrix_is_refused() -> None:
    span = Span(
        param=torch.zeros(64),
        grad=torch.zeros(64),
        state={"momentum_buffer": torch.zeros(64)},
        blocks=(Block(offset=0, shape=(64,)),),
        step=1,
    )
    with pytest.raises(RuleError, match=r"got a block of shape \(64,\)"):
        Muon().update(span, Muon().defaults())


def test_an_unknown_method_names_those_there_are() -> None:
    with pytest.raises(RuleError, match="method polar is not supported; choose 'standard', 'gram' or 'auto'"):
        Muon(method="polar")
