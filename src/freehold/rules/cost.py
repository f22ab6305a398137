"""What Newton-Schulz costs on this machine, measured once a shape: the numbers that the planner can balance by."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from freehold.errors import RuleError
from freehold.plan.cost import newton_schulz_flops
from freehold.plan.spec import ParamSpec
from freehold.rules.newton_schulz import COEFFICIENTS, NUM_STEPS
from freehold.rules.polar.coefficients import Coefficients, schedule_of
from freehold.rules.polar.products import Workspace
from freehold.rules.polar.select import METHODS, select_variant
from freehold.rules.polar.variants import DTYPE_NAMES, MAX_BATCH_BYTES, pieces

__all__ = ["CostModel"]

_MAX_BATCH = 8  # time per matrix no longer falls beyond (docs/newton_schulz.md)
_MAX_RUN_S = 0.3  # larger shapes are timed at a smaller size and scaled by their flops
_REPEATS = 3
_PROBE_DIM = 512


@dataclass(slots=True, kw_only=True)
class CostModel:
    """Measured seconds of Newton-Schulz by shape and batch, on one device, by one method.

    A model is a cache: ``measured`` makes an empty one, and every shape is timed when it is first asked for. Ranks that
    plan for themselves need equal numbers, so measure on one rank, and give the others its ``to_json()``.

    Attributes:
        device: Where it measures.
        dtype: Compute dtype; ``None`` for that of the method.
        method: As in ``newton_schulz``.
        coefficients: As in ``newton_schulz``.
        num_steps: As in ``newton_schulz``.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> model = CostModel.measured("cpu")
        >>> params = [ParamSpec(name=f"layers.{i}.weight", shape=(64, 32)) for i in range(4)]
        >>> layout = plan(params, num_ranks=2, costs=model.table(params))
        >>> model.seconds(64, 32, num_matrices=2) > 0
        True
        >>> CostModel.from_json(model.to_json()).table(params) == model.table(params)
        True
    """

    device: torch.device
    dtype: torch.dtype | None = None
    method: str = "standard"
    coefficients: Coefficients = COEFFICIENTS
    num_steps: int = NUM_STEPS
    _seconds: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])

    @classmethod
    def measured(
        cls,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        method: str = "standard",
        coefficients: Coefficients = COEFFICIENTS,
        num_steps: int = NUM_STEPS,
    ) -> CostModel:
        """A model that measures on this machine as it is asked.

        Raises:
            RuleError: No such method.
        """
        if method not in METHODS:
            raise RuleError(f"CostModel: method must be one of {METHODS}, got {method!r}")
        return cls(
            device=torch.device(device), dtype=dtype, method=method, coefficients=coefficients, num_steps=num_steps
        )

    def seconds(self, num_rows: int, num_cols: int, num_matrices: int = 1) -> float:
        """Seconds for a batch of matrices ``(M, N)``; those beyond 8 cost as much as the first 8 do on average."""
        batch = min(num_matrices, _MAX_BATCH)
        key = (num_rows, num_cols, batch)
        if key not in self._seconds:
            self._seconds[key] = self._measure(*key)
        return self._seconds[key] * num_matrices / batch

    def table(self, params: Iterable[ParamSpec], *, num_ranks: int = 1) -> dict[tuple[int, int], int]:
        """Nanoseconds of one matrix of each shape, for ``plan(costs=...)``.

        Args:
            params: What is to be planned; matrices count in batches as large as an even share of their shape.
            num_ranks: Ranks that share them.
        """
        counts: dict[tuple[int, int], int] = {}
        for spec in params:
            if spec.matrix_shape is not None and spec.tied_to is None:
                counts[spec.matrix_shape] = counts.get(spec.matrix_shape, 0) + spec.num_granules
        result: dict[tuple[int, int], int] = {}
        for shape, count in counts.items():
            batch = max(1, count // num_ranks)
            result[shape] = max(1, round(1e9 * self.seconds(*shape, num_matrices=batch) / batch))
        return result

    def to_json(self) -> str:
        """All that was measured, and of what."""
        rows = [[*key, value] for key, value in sorted(self._seconds.items())]
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        record = {
            "device": str(self.device),
            "dtype": dtype,
            "method": self.method,
            "coefficients": self.coefficients,
            "num_steps": self.num_steps,
            "seconds": rows,
        }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The inverse of ``to_json``; shapes that it lacks are measured here.

        Raises:
            RuleError: Text that ``to_json`` did not write.
        """
        try:
            record: dict[str, Any] = json.loads(text)
            model = cls.measured(
                str(record["device"]),
                None if record["dtype"] is None else DTYPE_NAMES[record["dtype"]],
                method=record["method"],
                coefficients=_as_tuples(record["coefficients"]),
                num_steps=record["num_steps"],
            )
            model._seconds.update({(int(m), int(n), int(b)): float(s) for m, n, b, s in record["seconds"]})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RuleError(f"CostModel.from_json takes what to_json wrote: {type(error).__name__}: {error}") from error
        return model

    def _measure(self, num_rows: int, num_cols: int, num_matrices: int) -> float:
        flops = num_matrices * newton_schulz_flops(num_rows, num_cols, max(1, self.num_steps))
        scale = min(1.0, (_MAX_RUN_S * self._flops_per_s() / flops) ** (1 / 3))
        rows, cols = (max(min(size, _PROBE_DIM), int(size * scale)) for size in (num_rows, num_cols))
        sample_flops = num_matrices * newton_schulz_flops(rows, cols, max(1, self.num_steps))
        matrices = torch.randn(num_matrices, rows, cols, device=self.device)
        schedule = schedule_of(self.coefficients, self.num_steps)
        variant = select_variant(self.method, self.dtype, matrices, schedule)
        work = Workspace()
        best = float("inf")
        for _ in range(1 + _REPEATS):  # the first warms up, and counts only if it is the fastest
            begin = time.perf_counter()
            for _ in pieces(matrices, variant, schedule, work, max_batch_bytes=MAX_BATCH_BYTES):
                pass
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            best = min(best, time.perf_counter() - begin)
        return best * flops / sample_flops

    def _flops_per_s(self) -> float:
        dtype = self.dtype or torch.bfloat16
        square = torch.ones(_PROBE_DIM, _PROBE_DIM, dtype=dtype, device=self.device)
        begin = time.perf_counter()
        _ = square @ square
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 2 * _PROBE_DIM**3 / (time.perf_counter() - begin)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, cast("list[Any]", value))) if isinstance(value, list) else value
