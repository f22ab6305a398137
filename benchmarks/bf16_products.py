"""Bfloat16 matrix products at the speed of float32 ones, for CPUs that have no bfloat16 units.

Newton-Schulz runs in bfloat16. Without AVX512-BF16 or AMX, PyTorch multiplies bfloat16 matrices on CPU by a fallback
that reaches about 1 Gflop/s where float32 reaches 45: a benchmark would then measure that fallback and nothing else.
Under ``Float32Products`` every such product, in whatever system, is formed in float32 and rounded to bfloat16 once,
which is what hardware with bfloat16 units does. ``measure_products`` tells whether this machine needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Float32Products", "ProductRates", "measure_products"]

_ATEN = torch.ops.aten
_PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default})


class Float32Products(TorchDispatchMode):
    """While active in this thread, bfloat16 matrix products are computed in float32 and rounded.

    Example:
        >>> ones = torch.ones(2, 2, dtype=torch.bfloat16)
        >>> with Float32Products():
        ...     product = ones @ ones
        >>> product.dtype, product.tolist()
        (torch.bfloat16, [[2.0, 2.0], [2.0, 2.0]])
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See ``TorchDispatchMode``."""
        if func in _PRODUCTS and args[0].dtype is torch.bfloat16:
            return func(*(factor.float() for factor in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRates:
    """Flop/s of the product of two 512 x 512 matrices on one thread."""

    bfloat16: float
    float32: float

    @property
    def needs_substitute(self) -> bool:
        """Whether bfloat16 products are slower than float32 ones, by more than the measurement could err.

        Example:
            >>> ProductRates(bfloat16=1.2e9, float32=45e9).needs_substitute
            True
            >>> ProductRates(bfloat16=120e9, float32=60e9).needs_substitute
            False
        """
        return self.bfloat16 < 0.5 * self.float32


def measure_products() -> ProductRates:
    """Time a few products in both dtypes; less than a second even with the fallback."""
    return ProductRates(bfloat16=_flops_per_s(torch.bfloat16), float32=_flops_per_s(torch.float32))


def _flops_per_s(dtype: torch.dtype) -> float:
    square = torch.full((512, 512), 1 / 512, dtype=dtype)
    best_s = float("inf")
    for _ in range(3):
        start_s = time.perf_counter()
        square @ square
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * 512**3 / best_s
