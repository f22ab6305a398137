"""The forms of the iteration against a float64 polar factor, at every scale, rank and shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from freehold.errors import RuleError
from freehold.rules import newton_schulz
from freehold.rules.polar.coefficients import COEFFICIENT_SETS, POLAR_EXPRESS_SAFETY, schedule_of
from freehold.rules.polar.forms import gram_form, gram_operations, restart_steps, standard_form
from freehold.rules.polar.products import MIN_HALVES_DIM, Workspace, symmetric_product
from freehold.rules.polar.variants import Variant, pieces

METHODS = ("standard", "gram", "auto")
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
SHAPES = ((1, 1), (1, 9), (9, 1), (7, 13), (33, 65), (65, 33), (64, 64), (16, 105), (3, 24, 40), (4, 40, 24))
SETS = tuple(sorted(COEFFICIENT_SETS))


def iterated(grad: Tensor, coefficients: str, num_steps: int = 5) -> Tensor:
    """The iteration in float64 on the singular values."""
    left, values, right = torch.linalg.svd(grad.double(), full_matrices=False)
    x = values / values.norm(dim=-1, keepdim=True)
    for a, b, c in schedule_of(coefficients, num_steps):
        x = a * x + b * x**3 + c * x**5
    return left * x.unsqueeze(-2) @ right


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_float64_iteration(method: str, shape: tuple[int, ...], coefficients: str) -> None:
    grad = torch.randn(shape, dtype=torch.float64)
    out = newton_schulz(grad, coefficients=coefficients, dtype=torch.float64, method=method)
    assert relative_error(out, iterated(grad, coefficients)) < 1e-9
    # float32 keeps 24 bits, of which small singular values lose some: 485**2 * 2**-24 at worst
    out = newton_schulz(grad, coefficients=coefficients, dtype=torch.float32, method=method)
    assert relative_error(out, iterated(grad, coefficients)) < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("coefficients", ["jordan", "polar_express"])
@pytest.mark.parametrize("shape", [(64, 64), (48, 192), (192, 48), (6, 32, 80)], ids=str)
def test_gram_in_low_precision_is_about_as_accurate_as_the_standard_form(
    shape: tuple[int, ...], coefficients: str, dtype: torch.dtype
) -> None:
    grad = torch.randn(shape)
    expected = iterated(grad, coefficients)
    errors = [
        relative_error(newton_schulz(grad, coefficients=coefficients, dtype=dtype, method=method), expected)
        for method in ("standard", "gram")
    ]
    assert errors[1] < 6 * errors[0]
    assert errors[1] < (0.06 if dtype == torch.bfloat16 else 0.012)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("coefficients", ["jordan", "polar_express"])
def test_gram_survives_what_restarts_are_for(coefficients: str, dtype: torch.dtype) -> None:
    # rank 3 of 64, and one singular value 1e4 times the others: rounding makes eigenvalues of the Gram matrix negative
    for grad in (
        torch.randn(64, 3) @ torch.randn(3, 256),
        torch.randn(64, 256) + 1e3 * torch.randn(64, 1) @ torch.randn(1, 256),
    ):
        values = torch.linalg.svdvals(
            newton_schulz(grad, coefficients=coefficients, dtype=dtype, method="gram").double()
        )
        assert values.isfinite().all()
        assert values.max() < 1.3


def test_without_restarts_the_gram_form_would_explode_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.randn(64, 3) @ torch.randn(3, 256)
    monkeypatch.setattr("freehold.rules.polar.forms.restart_steps", lambda *_: frozenset())
    out = newton_schulz(grad, method="gram")
    assert not (out.isfinite().all() and torch.linalg.svdvals(out.double()).max() < 10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1), (16, 24), (24, 16), (3, 16, 24)], ids=str)
def test_b07_zero_tiny_huge_and_rank_deficient_input_is_never_nan(
    shape: tuple[int, ...], dtype: torch.dtype, method: str
) -> None:
    grad = torch.randn(shape)
    deficient = torch.ones(shape)
    with_zero_row = grad.clone()
    with_zero_row[..., 0, :] = 0.0
    for scale in (0.0, 1e-45, 1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e37):
        for candidate in (grad, deficient, with_zero_row):
            out = newton_schulz(candidate * scale, dtype=dtype, method=method)
            assert out.isfinite().all(), scale
            assert out.dtype == dtype
            if scale == 0.0:
                assert not out.any()


@pytest.mark.parametrize("method", METHODS)
def test_b07_nan_stays_in_its_matrix(method: str) -> None:
    grads = torch.randn(3, 16, 48)
    expected = newton_schulz(grads, method=method)
    grads[1, 2, 3] = float("nan")
    out = newton_schulz(grads, method=method)
    assert out[1].isnan().all()
    torch.testing.assert_close(out[::2], expected[::2], rtol=0, atol=0.05)


@pytest.mark.parametrize("method", ["gram", "auto"])
def test_b07_powers_of_two_leave_every_bit_of_every_method(method: str) -> None:
    grad = torch.randn(16, 40)
    expected = newton_schulz(grad, method=method)
    for exponent in (-100, -30, 7, 90):
        assert torch.equal(newton_schulz(grad * 2.0**exponent, method=method), expected)


@pytest.mark.parametrize("method", METHODS)
def test_b23_a_stack_is_so_many_matrices(method: str) -> None:
    grads = torch.randn(5, 24, 64)
    together = newton_schulz(grads, method=method)
    for grad, out in zip(grads, together, strict=True):
        alone = newton_schulz(grad, method=method)
        assert relative_error(out, alone.double()) < (1e-9 if method == "standard" else 0.03)


def test_exact_coefficients_converge_to_the_polar_factor() -> None:
    left, _ = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(60, 24, dtype=torch.float64))
    grad = left @ torch.diag(torch.logspace(0, -1.5, 24, dtype=torch.float64)) @ right.mT
    for coefficients, num_steps in (("exact", 12), ("polar_express", 10)):
        out = newton_schulz(grad, coefficients=coefficients, num_steps=num_steps, dtype=torch.float64, method="gram")
        assert relative_error(out, left @ right.mT) < 1e-6, coefficients


def test_polar_express_is_minimax_on_its_intervals() -> None:
    # Before it is stretched, a quintic is the best on [l, u] up to a factor: its values at the ends and at the two
    # turning points between are two, alternating. Where l < 0.024 u the paper takes 0.024 u for it, and the factor
    # centres p(l) and p(u) about 1 (section 3.4).
    low, high = 1e-3, 1.0
    for a, b, c in COEFFICIENT_SETS["polar_express"][:5]:
        a, b, c = a * POLAR_EXPRESS_SAFETY, b * POLAR_EXPRESS_SAFETY**3, c * POLAR_EXPRESS_SAFETY**5
        first, second = sorted(root.real**0.5 for root in np.roots([5 * c, 3 * b, a]))
        at_low, least, at_low_cushioned, largest, at_high = (
            a * x + b * x**3 + c * x**5 for x in (low, second, max(low, 0.02407327424182761 * high), first, high)
        )
        assert at_low_cushioned == pytest.approx(least, rel=1e-6)
        assert at_high == pytest.approx(largest, rel=1e-6)
        assert at_low + at_high == pytest.approx(2.0, rel=1e-6)
        low, high = at_low, 2 - at_low


def test_operations_counted_are_operations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"square": 0, "apply": 0}
    real_matmul, real_fused = torch.matmul, torch.addmm

    def counted_matmul(left: Tensor, right: Tensor, **options: Tensor) -> Tensor:
        counts["square" if left.shape == right.shape else "apply"] += 1
        return real_matmul(left, right, **options)

    def counted_fused(base: Tensor, left: Tensor, right: Tensor, **options: float) -> Tensor:
        counts["square" if left.shape == right.shape else "apply"] += 1
        return real_fused(base, left, right, **options)

    monkeypatch.setattr(torch, "matmul", counted_matmul)
    monkeypatch.setattr(torch, "addmm", counted_fused)
    for dtype in DTYPES:
        for coefficients in SETS:
            counts.update(square=0, apply=0)
            schedule = schedule_of(coefficients, 7)
            gram_form(torch.randn(4, 8).to(dtype), schedule, Workspace(), is_tall=False, halves=False)
            counted = gram_operations(schedule, dtype)
            assert counts["square"] == counted.num_squares
            assert counts["apply"] == counted.num_grams + counted.num_applied
            assert len(restart_steps(schedule, dtype)) == counted.num_grams - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [MIN_HALVES_DIM, 517, 1030])
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_halves_are_the_whole_product_and_symmetric(lead: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(*lead, size, 96) / 10).to(dtype)
    base = x @ x.mT
    out = torch.empty_like(base)
    symmetric_product(base, x, x.mT, 0.5, 2.0, out, halves=True)
    torch.testing.assert_close(out, out.mT, rtol=0, atol=1e-5)
    expected = 0.5 * base.double() + 2.0 * (x.double() @ x.double().mT)
    assert relative_error(out, expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize("form", [standard_form, gram_form])
def test_forms_work_from_either_side(form: object, is_tall: bool) -> None:
    x = torch.randn(12, 30, dtype=torch.float64) / 20
    schedule = schedule_of("jordan", 5)
    given = x.mT.contiguous() if is_tall else x
    out = form(given, schedule, Workspace(), is_tall=is_tall, halves=False)  # type: ignore[operator]
    expected = standard_form(x, schedule, Workspace(), is_tall=False, halves=False)
    torch.testing.assert_close(out.mT if is_tall else out, expected, rtol=0, atol=1e-10)


def test_no_steps_only_normalise() -> None:
    grad = torch.randn(4, 6)
    for method in METHODS:
        out = newton_schulz(grad, num_steps=0, dtype=torch.float32, method=method)
        torch.testing.assert_close(out, grad / grad.norm())


@pytest.mark.parametrize("max_batch_bytes", [1, 500, 10**6])
def test_pieces_cover_the_batch_in_order_within_their_bound(max_batch_bytes: int) -> None:
    grads = torch.randn(9, 6, 10)
    variant = Variant(form="gram", dtype=torch.float32, batched=True)
    schedule = schedule_of("jordan", 5)
    whole = newton_schulz(grads, method="gram", dtype=torch.float32)
    covered = 0
    for start, stop, out in pieces(grads, variant, schedule, Workspace(), max_batch_bytes=max_batch_bytes):
        assert start == covered
        assert stop - start == 1 or (stop - start) * 240 <= max_batch_bytes
        torch.testing.assert_close(out, whole[start:stop], rtol=0, atol=1e-4)
        covered = stop
    assert covered == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "polar"}, "method must be one of .*got 'polar'"),
        ({"coefficients": "quintic"}, r"one of \['exact', 'jordan', 'polar_express'\], got 'quintic'"),
        ({"coefficients": ()}, r"got \(\)"),
        ({"max_batch_bytes": 0}, "max_batch_bytes must be at least 1, got 0"),
    ],
)
def test_unknown_methods_and_sets_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        newton_schulz(torch.zeros(2, 2), **options)  # type: ignore[arg-type]
