from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from freehold.errors import RuleError
from freehold.rules import Calibration, newton_schulz
from freehold.rules.polar import chooser, select
from freehold.rules.polar.coefficients import schedule_of
from freehold.rules.polar.variants import Variant

JORDAN = schedule_of("jordan", 5)
BOTH = (torch.bfloat16, torch.float32)


def task(num_rows: int, num_cols: int, num_matrices: int, device: str = "cpu") -> chooser.Task:
    return chooser.Task(
        num_rows=num_rows, num_cols=num_cols, num_matrices=num_matrices, schedule=JORDAN, device=torch.device(device)
    )


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Any], float]) -> None:
    """Products take what this function of them says."""

    def measure(table: Calibration, products: Iterable[Any]) -> None:
        table._seconds.update({chooser._key(product): seconds(product) for product in products})

    monkeypatch.setattr(Calibration, "_measure", measure)


def test_the_fastest_by_the_measured_products_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    # products of the Gram matrix are nearly free: the form that has most of them must win, and float32, with no restart
    pretend(monkeypatch, lambda product: 1e-9 if product.kind == "square" else float(product.long))
    monkeypatch.setattr(Calibration, "_estimate_s", lambda *_: 1.0)
    assert Calibration().choose(task(64, 128, 1), BOTH).to_text() == "gram float32"
    pretend(monkeypatch, lambda product: 1.0 if product.kind == "square" else 1e-9 * product.long)
    assert Calibration().choose(task(64, 130, 1), BOTH).form == "standard"


def test_a_batch_goes_together_where_that_is_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "_estimate_s", lambda *_: 1.0)
    for per_call, expected in ((0.9, True), (1.1, False)):
        pretend(monkeypatch, lambda product, each=per_call: each * product.num_matrices if product.is_batch else 1.0)
        assert Calibration().choose(task(64, 128, 16), BOTH).batched is expected


def test_a_slow_dtype_is_not_even_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # as on CPUs without bfloat16 units, where its products are 30 times slower
    monkeypatch.setattr(Calibration, "_probe", lambda _, dtype, *__, **___: 1e9 if dtype == torch.bfloat16 else 3e10)
    measured: list[torch.dtype] = []
    pretend(monkeypatch, lambda product: measured.append(product.dtype) or 1.0)
    assert Calibration().choose(task(64, 128, 4), BOTH).dtype == torch.float32
    assert set(measured) == {torch.float32}


def test_a_choice_holds_and_costs_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Calibration()
    first = table.choose(task(32, 64, 4), BOTH)
    pretend(monkeypatch, lambda _: pytest.fail("measured again"))
    assert table.choose(task(32, 64, 4), BOTH) is first


def test_calibration_is_cheap() -> None:
    table = Calibration()
    begin = time.perf_counter()
    for shape in ((256, 256, 8), (256, 1024, 4), (1024, 256, 4), (192, 256, 16)):
        table.choose(task(*shape), BOTH)
    assert time.perf_counter() - begin < 3.0  # 0.1 s where nothing else runs


def test_a_prediction_is_near_the_time_it_predicts() -> None:
    grads = torch.randn(8, 128, 256)
    table = Calibration()
    ratios = []
    for _ in range(3):  # other programs may run
        variant = table.choose(task(128, 256, 8), BOTH)
        predicted = table.variant_s(variant, task(128, 256, 8))
        newton_schulz(grads, method="auto")
        begin = time.perf_counter()
        newton_schulz(grads, method="auto")
        ratios.append((time.perf_counter() - begin) / predicted)
    assert 0.3 < min(ratios) < 4.0


def test_unmeasured_shapes_get_a_fixed_default(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Calibration(measuring=False)
    pretend(monkeypatch, lambda _: pytest.fail("measured"))
    assert table.choose(task(64, 128, 8), BOTH).to_text() == "gram bfloat16 batched"
    assert table.choose(task(128, 128, 1), BOTH).to_text() == "standard bfloat16"
    assert table.choose(task(512, 512, 8), BOTH).to_text() == "standard bfloat16 halves"
    assert table.choose(task(64, 64, 8), (torch.float64,)).dtype == torch.float64
    assert Calibration().choose(task(64, 128, 8, "meta"), BOTH).form == "gram"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("short", [255, 256])
@pytest.mark.parametrize("num_matrices", [1, 8])
def test_gram_and_unmeasured_auto_batch_the_same_matrices(num_matrices: int, short: int, device: str) -> None:
    default = chooser.default_variant(task(short, 1024, num_matrices, device))
    gram = select.gram_variant(short, num_matrices, torch.bfloat16, torch.device(device))
    assert default.batched == gram.batched == (num_matrices > 1 and (device == "cuda" or short < 256))


def test_choices_can_be_kept_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    table, other = Calibration(), Calibration()
    chosen = table.choose(task(32, 64, 4), BOTH)
    other.load(table.to_json())
    pretend(monkeypatch, lambda _: pytest.fail("measured"))
    assert other.choose(task(32, 64, 4), BOTH) == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "JSON object of variants, got list"),
        ('{"cpu": "gram"}', "reads like .*got 'gram'"),
        ('{"cpu": "gram int8"}', "got 'gram int8'"),
        ('{"cpu": 3}', "got 3"),
    ],
)
def test_other_text_is_no_calibration(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Calibration().load(text)


def test_auto_keeps_to_a_dtype_that_is_given() -> None:
    grads = torch.randn(2, 8, 16)
    assert newton_schulz(grads, method="auto", dtype=torch.float32).dtype == torch.float32
    variant = select.select_variant("auto", torch.float64, grads, JORDAN)
    assert variant.dtype == torch.float64


def test_standard_on_an_accelerator_is_batched_and_on_cpu_is_not() -> None:
    meta = torch.empty(4, 8, 16, device="meta")
    assert select.select_variant("standard", None, meta, JORDAN) == Variant(
        form="torch", dtype=torch.bfloat16, batched=True
    )
    assert not select.select_variant("standard", None, torch.empty(4, 8, 16), JORDAN).batched
