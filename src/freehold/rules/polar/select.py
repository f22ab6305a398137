"""From the options of a rule, or of ``newton_schulz``, to the variant that runs."""

from __future__ import annotations

import torch
from torch import Tensor

from freehold.rules.polar.chooser import Task, calibration
from freehold.rules.polar.coefficients import Schedule
from freehold.rules.polar.variants import Variant, as_torch_has_it, is_better_batched

__all__ = ["METHODS", "select_variant"]

METHODS = ("standard", "gram", "auto")

# float16 costs as much as bfloat16 where it has units of its own, and is eight times as precise; the Gram form then
# needs one restart less. CPUs compute it in software.
_AUTO_DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16, torch.float16)}


def select_variant(method: str, dtype: torch.dtype | None, matrices: Tensor, schedule: Schedule) -> Variant:
    """The variant for a batch ``(B, M, N)``; ``dtype`` is ``None`` for bfloat16, or with ``"auto"`` the fastest."""
    num_matrices, num_rows, num_cols = matrices.shape
    device = matrices.device
    if method == "auto":
        dtypes = _AUTO_DTYPES.get(device.type, (torch.bfloat16,)) if dtype is None else (dtype,)
        task = Task(num_rows=num_rows, num_cols=num_cols, num_matrices=num_matrices, schedule=schedule, device=device)
        return calibration().choose(task, dtypes)
    if method == "standard":
        return as_torch_has_it(dtype or torch.bfloat16, device)
    return gram_variant(min(num_rows, num_cols), num_matrices, dtype or torch.bfloat16, device)


def gram_variant(short: int, num_matrices: int, dtype: torch.dtype, device: torch.device) -> Variant:
    """The Gram form with what never loses on CPU: small matrices batched, large ones by halves."""
    batched = is_better_batched(num_matrices, short, device)
    return Variant(form="gram", dtype=dtype, batched=batched, halves=device.type == "cpu" and not batched)
