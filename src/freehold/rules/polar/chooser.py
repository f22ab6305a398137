"""``method="auto"``: which variant is fastest for a shape on this machine, by timing the products that it consists of.

A variant's time is the sum of its products' times, and variants share products: so each product is timed once per
(shape, batch, dtype, device), on small samples, and every variant is priced from that table. The first update of a
shape pays for it, some tens of milliseconds; the choice then holds for the life of the process. Choices differ between
machines, and between runs where two variants are equally fast, and with them the last bits of the result. To have the
same choices again, keep ``calibration().to_json()`` and give it to ``load`` in the next run.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from freehold.errors import RuleError
from freehold.rules.polar.coefficients import Schedule
from freehold.rules.polar.products import MIN_HALVES_DIM, symmetric_product
from freehold.rules.polar.variants import Variant, is_better_batched

__all__ = ["Calibration", "Task", "calibration", "default_variant"]

# What a calibration may cost: the products of a shape take turns, so that other programs disturb them alike, and the
# least time of each counts. A product that would take longer than the cap is timed on a smaller shape and scaled by its
# flops, for by then its flop/s no longer grow.
_MAX_PRODUCT_S = 2e-3
_NUM_ROUNDS = 5
_MAX_SAMPLE_MATRICES = 8

# Variants whose flops, at the speed of a small probe, would take so much longer than the best are not measured at all.
_MAX_ESTIMATE_RATIO = 1.5
_PROBE_DIMS = (32, 64, 128, 256)

# One by one or batched: on CPU, only small matrices leave anything to gain.
_MAX_BATCHED_CPU_DIM = 383

_PRODUCT_FLOPS: dict[str, Callable[[int, int], int]] = {
    "gram": lambda short, long: 2 * short**2 * long,
    "square": lambda short, long: 2 * short**3,
    "apply": lambda short, long: 2 * short**2 * long,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A batch to be orthogonalised.

    Attributes:
        num_rows: ``M``.
        num_cols: ``N``.
        num_matrices: ``B``.
        schedule: ``(a, b, c)`` of every step.
        device: Where.
    """

    num_rows: int
    num_cols: int
    num_matrices: int
    schedule: Schedule
    device: torch.device

    @property
    def short(self) -> int:
        """The shorter side."""
        return min(self.num_rows, self.num_cols)

    @property
    def long(self) -> int:
        """The longer side."""
        return max(self.num_rows, self.num_cols)


def default_variant(task: Task) -> Variant:
    """What is taken where nothing was measured: bfloat16, the Gram form for matrices at least twice as wide as tall."""
    batched = is_better_batched(task.num_matrices, task.short, task.device)
    return Variant(
        form="gram" if task.long >= 2 * task.short else "standard",
        dtype=torch.bfloat16,
        batched=batched,
        halves=not batched and task.short >= MIN_HALVES_DIM and task.device.type == "cpu",
    )


@dataclass(slots=True, kw_only=True)
class Calibration:
    """Measured products and the choices made from them.

    Attributes:
        measuring: Whether shapes that are not known yet are measured; if not, they get ``default_variant``.
        choices: The variant by ``"device MxNxB dtypes checksum-of-the-schedule"``.

    Example:
        >>> import torch
        >>> table = Calibration(measuring=False)
        >>> schedule = ((3.4445, -4.775, 2.0315),) * 5
        >>> task = Task(num_rows=64, num_cols=256, num_matrices=8, schedule=schedule, device=torch.device("cpu"))
        >>> table.choose(task, (torch.bfloat16,)).to_text()
        'gram bfloat16 batched'
        >>> other = Calibration()
        >>> other.load(table.to_json())
    """

    measuring: bool = True
    choices: dict[str, Variant] = field(default_factory=dict[str, Variant])
    _seconds: dict[tuple[Any, ...], float] = field(default_factory=dict[tuple[Any, ...], float])

    def to_json(self) -> str:
        """The choices as a JSON object of texts."""
        return json.dumps({key: variant.to_text() for key, variant in sorted(self.choices.items())}, indent=1)

    def load(self, text: str) -> None:
        """Take over choices that ``to_json`` wrote.

        Raises:
            RuleError: Anything else.
        """
        try:
            table = json.loads(text)
        except json.JSONDecodeError as error:
            raise RuleError(
                f"a calibration is what Calibration.to_json wrote, got text that is no JSON: {error}"
            ) from None
        if not isinstance(table, dict):
            raise RuleError(f"a calibration is a JSON object of variants, got {type(table).__name__}")
        entries = cast("Mapping[str, Any]", table)
        self.choices.update({key: Variant.from_text(value) for key, value in entries.items()})

    def choose(self, task: Task, dtypes: tuple[torch.dtype, ...]) -> Variant:
        """The fastest variant for a batch of matrices, measured at its first use.

        Args:
            task: The batch.
            dtypes: Compute dtypes to choose from.
        """
        names = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        shape = f"{task.num_rows}x{task.num_cols}x{task.num_matrices}"
        key = f"{task.device.type} {shape} {names} {zlib.crc32(repr(task.schedule).encode()):08x}"
        found = self.choices.get(key)
        if found is None:
            found = self._fastest(task, dtypes)
            self.choices[key] = found
        return found

    def _fastest(self, task: Task, dtypes: tuple[torch.dtype, ...]) -> Variant:
        if not self.measuring or task.device.type not in ("cpu", "cuda") or not task.schedule:
            return _with_dtype(default_variant(task), dtypes)
        candidates = _candidates(task, dtypes)
        estimates = [self._estimate_s(variant, task) for variant in candidates]
        likely = [
            variant
            for variant, estimate in zip(candidates, estimates, strict=True)
            if estimate <= _MAX_ESTIMATE_RATIO * min(estimates)
        ]
        parts = [part for variant in likely for part in _parts(variant, task)]
        self._measure([product for product, _ in parts])
        return min(likely, key=lambda variant: self.variant_s(variant, task))

    def _estimate_s(self, variant: Variant, task: Task) -> float:
        """Seconds by flops and by the speed of a probe."""
        counts = variant.operations(task.schedule)
        flops = (counts.num_grams + counts.num_applied) * _PRODUCT_FLOPS["gram"](task.short, task.long)
        flops += counts.num_squares * _PRODUCT_FLOPS["square"](task.short, task.long)
        return task.num_matrices * flops / self._probe(variant.dtype, task.short, task.device, batched=variant.batched)

    def variant_s(self, variant: Variant, task: Task) -> float:
        """Predicted seconds for a batch: the sum of its products, each measured."""
        parts = _parts(variant, task)
        self._measure([product for product, _ in parts])
        return sum(count * self._seconds[_key(product)] for product, count in parts)

    def _measure(self, products: Iterable[_Product]) -> None:
        """Time the products that are not known yet, in turns."""
        missing = [product for product in dict.fromkeys(products) if _key(product) not in self._seconds]
        samples = {
            product: product.sample(self._probe(product.dtype, product.short, product.device, batched=product.is_batch))
            for product in missing
        }
        for round_index in range(1 + _NUM_ROUNDS):
            for product, sample in samples.items():
                seconds = _time(sample.call, product.device) * sample.scale
                if round_index > 0:  # the first warms up
                    key = _key(product)
                    self._seconds[key] = min(seconds, self._seconds.get(key, seconds))

    def _probe(self, dtype: torch.dtype, short: int, device: torch.device, *, batched: bool) -> float:
        """Flop/s of products of square matrices about as large as ``short``, up to 256."""
        dim = max(size for size in _PROBE_DIMS if size <= max(short, _PROBE_DIMS[0]))
        key = ("probe", dtype, dim, device, batched, torch.get_num_threads())
        if key not in self._seconds:
            lead = (_MAX_SAMPLE_MATRICES,) if batched else ()
            square = torch.full((*lead, dim, dim), 1.0 / dim, dtype=dtype, device=device)
            times = [_time(lambda: square @ square, device) for _ in range(1 + _NUM_ROUNDS)]
            self._seconds[key] = min(times) / square.shape[:-2].numel()
        return 2 * dim**3 / self._seconds[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """One kind of matrix product, as a variant runs it."""

    kind: str
    short: int
    long: int
    is_tall: bool
    num_matrices: int
    dtype: torch.dtype
    halves: bool
    device: torch.device

    @property
    def is_batch(self) -> bool:
        """Whether it is a batched product."""
        return self.num_matrices > 1

    def sample(self, flops_per_s: float) -> _Sample:
        """A run of about ``_MAX_PRODUCT_S`` at most, to be timed for it."""
        flops = _PRODUCT_FLOPS[self.kind](self.short, self.long)
        most = max(1.0, _MAX_PRODUCT_S * flops_per_s)
        num_matrices = max(1, min(self.num_matrices, _MAX_SAMPLE_MATRICES, int(most // flops)))
        if num_matrices == 1 < self.num_matrices:
            num_matrices = 2  # a batched product, not another kind of call
        scale = min(1.0, (most / flops) ** (1 / 3))
        short, long = (max(min(size, MIN_HALVES_DIM), int(size * scale)) for size in (self.short, self.long))
        sample_flops = _PRODUCT_FLOPS[self.kind](short, long)
        return _Sample(
            call=self._call(short, long, num_matrices),
            scale=flops / sample_flops * self.num_matrices / num_matrices,
        )

    def _call(self, short: int, long: int, num_matrices: int) -> Callable[[], Tensor]:
        lead = (num_matrices,) if self.num_matrices > 1 else ()
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        shape = (*lead, long, short) if self.is_tall else (*lead, short, long)
        x = torch.full(shape, 0.5 / long, **options)
        square = torch.full((*lead, short, short), 0.5 / long, **options)
        if self.kind == "apply":
            left, right = (x, square) if self.is_tall else (square, x)
            out = torch.empty(shape, **options)
            return lambda: torch.matmul(left, right, out=out)
        out = torch.empty_like(square)
        left, right = (x.mT, x) if self.is_tall else (x, x.mT)
        base = square if self.kind == "square" else None
        return lambda: symmetric_product(base, left, right, 0.5, 0.5, out, halves=self.halves)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A call, and how many times as long the product takes for which it stands."""

    call: Callable[[], Tensor]
    scale: float


def _key(product: _Product) -> tuple[Any, ...]:
    return product, torch.get_num_threads()


def _parts(variant: Variant, task: Task) -> list[tuple[_Product, int]]:
    """The products of a variant, and how many of each a batch takes."""
    counts = variant.operations(task.schedule)
    calls = 1 if variant.batched else task.num_matrices
    return [
        (
            _Product(
                kind=kind,
                short=task.short,
                long=task.short if kind == "square" else task.long,
                is_tall=task.num_rows > task.num_cols and kind != "square" and variant.form != "torch",
                num_matrices=task.num_matrices if variant.batched else 1,
                dtype=variant.dtype,
                halves=variant.halves and kind != "apply",
                device=task.device,
            ),
            count * calls,
        )
        for kind, count in (("gram", counts.num_grams), ("square", counts.num_squares), ("apply", counts.num_applied))
    ]


def _time(call: Callable[[], Tensor], device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def _nothing() -> None:
    """On CPU a call has ended when it returns."""


def _candidates(task: Task, dtypes: tuple[torch.dtype, ...]) -> list[Variant]:
    is_cpu = task.device.type == "cpu"
    one_by_one = task.num_matrices == 1 or is_cpu  # a launch for each small matrix is never faster on an accelerator
    together = task.num_matrices > 1 and (not is_cpu or task.short <= _MAX_BATCHED_CPU_DIM)
    return [
        Variant(form=form, dtype=dtype, batched=batched, halves=halves)
        for dtype in dtypes
        for form in ("standard", "gram")
        for batched, is_possible in ((False, one_by_one), (True, together))
        for halves in (False, True)
        if is_possible and (not halves or task.short >= MIN_HALVES_DIM)
    ]


def _with_dtype(variant: Variant, dtypes: tuple[torch.dtype, ...]) -> Variant:
    dtype = variant.dtype if variant.dtype in dtypes else dtypes[0]
    return Variant(form=variant.form, dtype=dtype, batched=variant.batched, halves=variant.halves)


_CALIBRATION = Calibration()


def calibration() -> Calibration:
    """The calibration of this process, which ``method="auto"`` asks."""
    return _CALIBRATION
