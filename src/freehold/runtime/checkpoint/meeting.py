"""How ranks come together for a checkpoint: all in the same call, or none."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from freehold.errors import CheckpointError, LifecycleError
from freehold.runtime.agreement import CALLS, StepRow, agree, exchange_step_rows
from freehold.runtime.consensus import options_text
from freehold.runtime.update import refresh_masters

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["meet"]


def meet(opt: LayerwiseOptimizer, operation: str) -> None:
    """Make sure that all ranks made this call, and bring weights and masters up to date. Collective.

    Args:
        opt: Of this rank.
        operation: The call, one of ``CALLS``.

    Raises:
        ConsistencyError: Another rank is in another call, such as ``step``; on all ranks.
        LifecycleError: Closed; or, unless it loads, between a backward that updates early and its ``step``, or after an
            update or a load that failed half-way on any rank.
    """
    opt._refuse_if_closed()
    opt.synchronize()
    error = None
    if opt._early.done and not operation.startswith("load"):  # loading makes up for it
        early = sorted(opt._early.done)
        error = LifecycleError(f"{operation}: backward has updated buckets {early} already; call step() first")
    elif opt._update_error is not None and not operation.startswith("load"):
        error = LifecycleError(
            f"{operation}: weights and state are incomplete, since an earlier step or load failed half-way "
            f"({opt._update_error}); load a checkpoint"
        )
    written = [p.param._version != p.version for p in opt._params]
    row: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(StepRow)), 0)
    row |= {"operation": CALLS.index(operation), "written": any(written), "failed": error is not None}
    rows = exchange_step_rows(opt._comm, StepRow(**row))
    if any(other.failed for other in rows):
        agree(opt._comm, error, doing=operation)
    if any(other.operation != row["operation"] for other in rows):
        shown = {"the call": operation, "param_groups": options_text(opt.param_groups)}
        agree(opt._comm, None, shown, doing=f"{operation} (every rank must call it)")
        raise CheckpointError(f"{operation}: another rank made another call; every rank must call {operation}")
    if any(other.written for other in rows):  # what the next step would do first
        flags = opt._comm.max_(torch.tensor(written, dtype=torch.uint8)).tolist()
        with torch.no_grad():
            for bucket in opt._buckets:
                refresh_masters(bucket, {index for index, flag in enumerate(flags) if flag})
