from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import _muon as torch_muon  # the oracle has no public name

from freehold.errors import RuleError
from freehold.rules import newton_schulz
from freehold.rules.newton_schulz import COEFFICIENTS

SHAPES = ((1, 1), (1, 9), (9, 1), (7, 13), (33, 65), (65, 33), (64, 64), (16, 105), (105, 16), (128, 40))
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def torch_newton_schulz(grad: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS) -> Tensor:
    return torch_muon._zeropower_via_newtonschulz(grad, coefficients, 5, 1e-7)


def quintic(singular_values: Tensor, num_steps: int = 5) -> Tensor:
    """What ``num_steps`` steps make of singular values of a matrix of norm 1, in float64."""
    a, b, c = COEFFICIENTS
    x = singular_values.double()
    for _ in range(num_steps):
        x = a * x + b * x**3 + c * x**5
    return x


def with_singular_values(values: Tensor, num_rows: int, num_cols: int) -> Tensor:
    left, _ = torch.linalg.qr(torch.randn(num_rows, len(values), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(num_cols, len(values), dtype=torch.float64))
    return left @ torch.diag(values.double()) @ right.mT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 3e-7, 7e-4, 1e9, 1e16])
def test_bits_are_those_of_torch_at_ordinary_norms(shape: tuple[int, int], scale: float) -> None:
    grad = torch.randn(shape) * scale
    assert 1e-7 < grad.norm() < 2**60
    ours, torchs = newton_schulz(grad), torch_newton_schulz(grad)
    assert torch.equal(ours, torchs)
    assert (ours.dtype, ours.stride()) == (torchs.dtype, torchs.stride())


def test_bits_are_those_of_torch_with_other_coefficients_and_noncontiguous_input() -> None:
    coefficients = (2.0, -1.5, 0.5)
    grad = torch.randn(48, 80)[:, ::2].mT
    ours = newton_schulz(grad, coefficients=coefficients)
    assert torch.equal(ours, torch_newton_schulz(grad, coefficients))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(24, 24), (20, 50), (50, 20), (1, 30), (30, 1)], ids=str)
def test_singular_vectors_stay_and_singular_values_follow_the_quintic(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.02}[dtype]
    values = torch.linspace(1.0, 0.2, min(shape))
    grad = with_singular_values(values, *shape)
    left, singular_values, right = torch.linalg.svd(grad, full_matrices=False)
    expected = left @ torch.diag(quintic(singular_values / grad.norm())) @ right
    out = newton_schulz(grad, dtype=dtype).double()
    assert torch.linalg.matrix_norm(out - expected, ord=2) < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_is_near_the_polar_factor(dtype: torch.dtype) -> None:
    grad = with_singular_values(torch.logspace(0, -1.5, 32), 32, 64)
    left, singular_values, right = torch.linalg.svd(grad, full_matrices=False)
    assert singular_values[-1] > 0.002 * grad.norm()  # where the documented band begins
    out = newton_schulz(grad, dtype=dtype).double()
    produced = torch.linalg.svdvals(out)
    assert produced.min() > 0.66
    assert produced.max() < 1.23
    in_singular_basis = left.mT @ out @ right.mT
    off_diagonal = in_singular_basis - torch.diag(in_singular_basis.diagonal())
    assert off_diagonal.abs().max() < (0.03 if dtype == torch.bfloat16 else 1e-4)
    polar = left @ right
    assert (out * polar).sum() / (out.norm() * polar.norm()) > 0.98


def test_documented_band_and_lift_are_those_of_the_quintic() -> None:
    values = torch.logspace(-9, 0, 20_001, dtype=torch.float64)
    mapped = quintic(values)
    inside = mapped[values >= 0.002]
    assert inside.min() > 0.68
    assert inside.max() < 1.21
    lift = (mapped / values).max()
    assert 484 < lift < 485


def test_rank_deficient_matrices_gain_nothing_where_they_are_zero() -> None:
    values = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    grad = with_singular_values(values, 20, 30)
    produced = torch.linalg.svdvals(newton_schulz(grad, dtype=torch.float64))
    torch.testing.assert_close(
        produced[:3].sort().values,
        quintic(values / values.norm()).sort().values,
        rtol=0,
        atol=1e-10,
    )
    assert produced[3:].max() < 1e-10
    assert newton_schulz(grad).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_row_stays_zero(dtype: torch.dtype) -> None:
    grad = torch.randn(8, 12)
    grad[3] = 0.0
    assert not newton_schulz(grad, dtype=dtype)[3].any()


@pytest.mark.parametrize("shape", [(5, 8, 16), (3, 16, 7), (1, 12, 9), (4, 20, 20)], ids=str)
def test_b23_batches_have_the_bits_of_separate_matrices(shape: tuple[int, int, int]) -> None:
    grads = torch.randn(shape) * torch.logspace(-30, 10, shape[0]).view(-1, 1, 1)
    separate = torch.stack([newton_schulz(grad) for grad in grads])
    assert torch.equal(newton_schulz(grads), separate)
    strided = torch.empty(shape[0], 1024)[:, : shape[1] * shape[2]].unflatten(1, shape[1:])
    assert torch.equal(newton_schulz(strided.copy_(grads)), separate)


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_autograd_is_not_recorded(scale: float) -> None:
    grad = (torch.randn(4, 6) * scale).requires_grad_()
    out = newton_schulz(grad)
    assert not out.requires_grad
    assert torch.equal(out, newton_schulz(grad.detach()))


def test_an_empty_batch_is_an_empty_result() -> None:
    assert newton_schulz(torch.zeros(0, 4, 8)).shape == (0, 4, 8)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (2, 5, 7)], ids=str)
def test_input_is_left_unchanged(grad_dtype: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # torch 2.13 normalises a bf16 gradient in place, and with it the momentum buffer
    grad = torch.randn(shape).to(grad_dtype)
    before = grad.clone()
    out = newton_schulz(grad, dtype=dtype)
    assert torch.equal(grad, before)
    assert out.dtype == dtype
    assert out.shape == grad.shape


@pytest.mark.parametrize("scale", [1e-10, 1e-20, 1e-30, 1e-38, 1e20, 1e37])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)], ids=str)
def test_b07_norm_of_the_result_does_not_depend_on_scale(scale: float, dtype: torch.dtype, rtol: float) -> None:
    grad = torch.randn(32, 64)
    expected = newton_schulz(grad, dtype=dtype).double().norm()
    scaled = grad * scale
    assert scaled.any()
    actual = newton_schulz(scaled, dtype=dtype).double().norm()
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (13, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64], ids=str)
def test_b07_powers_of_two_leave_every_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    grad = torch.randn(shape)
    expected = newton_schulz(grad, dtype=dtype)
    smallest = int(torch.frexp(grad.abs().min()).exponent)
    largest = int(torch.frexp(grad.abs().max()).exponent)
    for exponent in range(-125 - smallest, 128 - largest):
        scaled = torch.ldexp(grad.double(), torch.tensor(exponent)).float()
        assert torch.equal(newton_schulz(scaled, dtype=dtype), expected), f"2**{exponent}"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 20),
    num_cols=st.integers(1, 20),
    exponent=st.integers(-100, 100),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
)
def test_b07_powers_of_two_leave_every_bit_of_any_shape(
    num_rows: int, num_cols: int, exponent: int, seed: int, dtype: torch.dtype
) -> None:
    grad = torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(seed))
    scaled = grad * 2.0**exponent
    assert torch.equal(newton_schulz(scaled, dtype=dtype), newton_schulz(grad, dtype=dtype))


@pytest.mark.parametrize("exponent", [-1040, -700, -300, 300, 700, 1010])
def test_b07_float64_gradients_beyond_the_range_of_float32(exponent: int) -> None:
    grad = torch.randn(9, 14, dtype=torch.float64).float().double()  # few bits, so that subnormals are exact
    scaled = torch.ldexp(grad, torch.tensor(exponent))
    assert torch.equal(newton_schulz(scaled), newton_schulz(grad))


def test_b07_subnormal_matrices_are_orthogonalised() -> None:
    grad = torch.diag(torch.tensor([3.0, -2.0, 1.0]))
    smallest = (grad.double() * 2.0**-149).float()
    assert torch.equal((smallest > 0), (grad > 0))
    assert torch.equal(newton_schulz(smallest), newton_schulz(grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (3, 4, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-7, 1.0])
def test_b07_zeros_give_exact_zeros(shape: tuple[int, ...], dtype: torch.dtype, eps: float) -> None:
    assert torch.equal(newton_schulz(torch.zeros(shape), dtype=dtype, eps=eps), torch.zeros(shape).to(dtype))


@pytest.mark.parametrize("factor", [1e5, 1e30])
def test_b07_float16_compute_does_not_overflow(factor: float) -> None:
    grad = torch.randn(32, 64)
    expected = newton_schulz(grad, dtype=torch.float32)
    out = newton_schulz(grad * factor, dtype=torch.float16)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_b07_nan_and_infinity_give_nan(bad: float, dtype: torch.dtype, num_steps: int, scale: float) -> None:
    grad = torch.randn(6, 9) * scale
    grad[2, 3] = bad
    assert newton_schulz(grad, dtype=dtype, num_steps=num_steps).isnan().all()


def test_b07_a_bad_matrix_does_not_spoil_its_batch() -> None:
    grads = torch.randn(3, 6, 9)
    expected = newton_schulz(grads)
    grads[1, 0, 0] = float("nan")
    out = newton_schulz(grads)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (33, 65)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_b07_the_branch_for_accelerators_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    # there the host does not look at the norm: every matrix is divided by a power of two
    grad = torch.randn(shape)
    expected = newton_schulz(grad, dtype=dtype)
    monkeypatch.setattr(sys.modules["freehold.rules.polar.scaling"], "SAFE_NORM_MIN", torch.inf)
    assert torch.equal(newton_schulz(grad, dtype=dtype), expected)


def test_b10_clipping_before_it_changes_nothing() -> None:
    grad = torch.randn(64, 64)
    expected = newton_schulz(grad, dtype=torch.float32)
    for factor in (0.37, 1e-3 / float(grad.norm())):
        out = newton_schulz(grad * factor, dtype=torch.float32)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("grad", "options", "message"),
    [
        (torch.zeros(4), {}, r"got shape \(4,\)"),
        (torch.zeros(2, 2, 2, 2), {}, r"got shape \(2, 2, 2, 2\)"),
        (torch.zeros(2, 2), {"coefficients": (1.0, 2.0)}, r"exactly 3 values, .*got \(1.0, 2.0\)"),
        (torch.zeros(2, 2), {"num_steps": 100}, "num_steps must be from 0 to 99, got 100"),
        (torch.zeros(2, 2), {"num_steps": -1}, "num_steps must be from 0 to 99, got -1"),
        (torch.zeros(2, 2), {"eps": -1.0}, "eps must be >= 0"),
    ],
)
def test_bad_arguments_are_named(grad: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        newton_schulz(grad, **options)  # type: ignore[arg-type]
