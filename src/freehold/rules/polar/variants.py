"""One way to run Newton-Schulz, and running it over a batch of matrices within bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from freehold.errors import RuleError
from freehold.rules.polar.coefficients import Schedule
from freehold.rules.polar.forms import (
    Operations,
    gram_form,
    gram_operations,
    standard_form,
    standard_operations,
)
from freehold.rules.polar.products import Workspace
from freehold.rules.polar.scaling import normalised

__all__ = ["DTYPE_NAMES", "MAX_BATCH_BYTES", "Variant", "as_torch_has_it", "is_better_batched", "pieces"]

# 256 MiB of matrices in the compute dtype fill any accelerator; a batch needs up to 10 times that at worst.
MAX_BATCH_BYTES = 2**28

# A rule of thumb for CPUs, where nothing was measured: from this shorter side on, a matrix is work enough for a product
# of its own, which may then go by halves; below it, a batch saves calls. method="auto" measures instead.
MIN_ALONE_DIM = 256

DTYPE_NAMES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the iteration.

    Attributes:
        form: ``"torch"``: the order of operations of ``torch.optim.Muon``, whose bits it gives; ``"standard"``: the
            same products, with tall matrices multiplied from the right; ``"gram"``: see [Note: Gram form].
        dtype: What it computes in.
        batched: Whether the matrices of a batch go through one batched product, or one by one.
        halves: Whether symmetric products are computed by halves.

    Example:
        >>> variant = Variant(form="gram", dtype=torch.float32, batched=True)
        >>> Variant.from_text(variant.to_text()) == variant
        True
    """

    form: Literal["torch", "standard", "gram"]
    dtype: torch.dtype
    batched: bool
    halves: bool = False

    def to_text(self) -> str:
        """Such as ``"gram bfloat16 batched"``."""
        words = (self.form, str(self.dtype).removeprefix("torch."), "batched" * self.batched, "halves" * self.halves)
        return " ".join(word for word in words if word)

    @classmethod
    def from_text(cls, text: str) -> Variant:
        """The inverse of ``to_text``.

        Raises:
            RuleError: Any other text.
        """
        form, dtype, *flags = [*str(text).split(), "", ""]
        known = {"batched", "halves", ""}
        if form not in ("torch", "standard", "gram") or dtype not in DTYPE_NAMES or set(flags) - known:
            raise RuleError(f"a Newton-Schulz variant reads like 'gram bfloat16 batched halves', got {text!r}")
        return cls(
            form=cast("Any", form),
            dtype=DTYPE_NAMES[dtype],
            batched="batched" in flags,
            halves="halves" in flags,
        )

    def operations(self, schedule: Schedule) -> Operations:
        """The matrix products that it takes."""
        return gram_operations(schedule, self.dtype) if self.form == "gram" else standard_operations(schedule)


def as_torch_has_it(dtype: torch.dtype, device: torch.device) -> Variant:
    """The variant of ``method="standard"``: on CPU matrix by matrix, so that the bits are those of separate calls."""
    return Variant(form="torch", dtype=dtype, batched=device.type != "cpu")


def is_better_batched(num_matrices: int, short: int, device: torch.device) -> bool:
    """Whether matrices go through batched products where nothing was measured; ``short`` is their shorter side.

    Example:
        >>> cpu = torch.device("cpu")
        >>> [is_better_batched(*case, cpu) for case in ((8, 255), (8, 256), (1, 64))]
        [True, False, False]
    """
    return num_matrices > 1 and (device.type != "cpu" or short < MIN_ALONE_DIM)


def pieces(
    matrices: Tensor,
    variant: Variant,
    schedule: Schedule,
    work: Workspace,
    *,
    max_batch_bytes: int = MAX_BATCH_BYTES,
) -> Iterator[tuple[int, int, Tensor]]:
    """Orthogonalise a batch piece by piece.

    Args:
        matrices: ``(B, M, N)`` with contiguous matrices, any floating dtype; left unchanged.
        variant: How.
        schedule: ``(a, b, c)`` of every step.
        work: Scratch; each result lies in it, and is gone once the next is asked for.
        max_batch_bytes: As many matrices go together as fit into this many bytes in the compute dtype, at least one.
            Work memory, the result included, is at most 3 such batches plus 5 of their Gram matrices ``(m, m)``, so at
            most 8 times this (10 in float16, which is normalised in float32), or what one matrix needs, if that is
            more.

    Yields:
        ``(start, stop, result)``: ``result`` is ``(stop - start, M, N)`` in the variant's dtype, for ``B`` matrices
        from ``start`` on; perhaps a transposed view.
    """
    num_matrices, num_rows, num_cols = matrices.shape
    together = 1
    if variant.batched:
        matrix_bytes = num_rows * num_cols * variant.dtype.itemsize
        together = max(1, max_batch_bytes // matrix_bytes)
    for start in range(0, num_matrices, together):
        stop = min(start + together, num_matrices)
        # A batch of one is given as a matrix: batched products of one matrix are up to three times slower.
        part = matrices[start] if stop == start + 1 else matrices[start:stop]
        result = _run(part, variant, schedule, work)
        yield start, stop, result if result.ndim == 3 else result.unsqueeze(0)


def _run(part: Tensor, variant: Variant, schedule: Schedule, work: Workspace) -> Tensor:
    is_tall = part.size(-2) > part.size(-1)
    if variant.form == "torch":
        x = normalised(part.mT if is_tall else part, variant.dtype)
        x = standard_form(x, schedule, work, is_tall=False, halves=False)
        return x.mT if is_tall else x
    form = gram_form if variant.form == "gram" else standard_form
    return form(normalised(part, variant.dtype), schedule, work, is_tall=is_tall, halves=variant.halves)
