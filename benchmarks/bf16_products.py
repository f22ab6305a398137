"""Bfloat16 matrix products at the speed of float32 ones, for CPUs that have no bfloat16 units.

Newton-Schulz runs in bfloat16. Without AVX512-BF16 or AMX, PyTorch multiplies bfloat16 matrices on CPU by a fallback
that reaches about 1 Gflop/s where float32 reaches 45: a benchmark would then measure that fallback and nothing else.
Under ``Float32Products`` every such product, in whatever system, is formed in float32 and rounded to bfloat16 once,
which is what hardware with bfloat16 units does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Float32Products"]

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
