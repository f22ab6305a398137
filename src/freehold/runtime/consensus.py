"""What all ranks must know before any of them uses gradients: decided together, in one small exchange."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freehold.errors import ConsistencyError, LifecycleError
from freehold.runtime.agreement import CALLS, StepRow, agree, exchange_step_rows, passes_needed
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.comm import Comm
from freehold.runtime.params import ManagedParam
from freehold.runtime.reducer import GradientReducer, WindowState
from freehold.runtime.routing import NamedParam
from freehold.runtime.wording import listed

__all__ = ["Settled", "StepConsensus", "options_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What the group agreed on, by index of params.

    Attributes:
        used: Some rank had a gradient for it in this window.
        written: The user wrote its weight on some rank since the last step.
    """

    used: set[int]
    written: set[int]


class StepConsensus:
    """Brings the ranks to one view of the window, and finishes its reductions.

    Args:
        params: The managed params, in model order.
        buckets: All buckets.
        frozen: Params that are not managed.
        reducer: Knows this rank's progress.
        comm: The group.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        buckets: Sequence[BucketBuffers],
        frozen: Sequence[NamedParam],
        reducer: GradientReducer,
        comm: Comm,
    ) -> None:
        self._params = params
        self._buckets = buckets
        self._frozen = frozen
        self._reducer = reducer
        self._comm = comm

    def settle(
        self, operation: str, param_groups: list[dict[str, Any]], error: Exception | None, *, single_pass: bool = False
    ) -> Settled:
        """Agree with the other ranks and finish all reductions. Collective; every rank calls it for the same operation.

        Args:
            operation: The public call, one of ``CALLS``.
            param_groups: The live options, which must be equal on all ranks.
            error: What this rank found wrong already; then all ranks raise.
            single_pass: Refuse a window with several synchronising backwards.

        Raises:
            ConsistencyError: The ranks differ.
            FreeholdError: What some rank found.
        """
        state, error = self._local_state(error)
        used = self._reducer.used()
        written = [p.param._version != p.version for p in self._params]
        options = options_text(param_groups)
        rows = exchange_step_rows(
            self._comm,
            StepRow(
                operation=CALLS.index(operation),
                failed=error is not None,
                options=zlib.crc32(options.encode()),
                passes_before=state.passes_before,
                passes=state.passes,
                pending=state.pending,
                plain=all(used),
                written=any(written),
            ),
        )
        self._refuse_disagreement(rows, operation, error, options)
        if single_pass and passes_needed(rows) > 1:
            counts = [row.passes + row.pending for row in rows]
            raise LifecycleError(
                f"{operation}: with early_update=True a window has one synchronising backward; by rank there were "
                f"{counts}. Put the others inside no_sync(). Weights were updated: start again from a checkpoint"
            )
        self._reducer.settle(passes_needed(rows))
        if not all(row.plain and not row.written for row in rows):
            flags = self._comm.max_(torch.tensor(used + written, dtype=torch.uint8)).tolist()
            used, written = flags[: len(used)], flags[len(used) :]
        return Settled(
            used={index for index, flag in enumerate(used) if flag},
            written={index for index, flag in enumerate(written) if flag},
        )

    def _local_state(self, error: Exception | None) -> tuple[WindowState, Exception | None]:
        if error is None:
            try:
                self._check_params()
                self._reducer.take_in_foreign_grads()
            except Exception as found:  # every rank must learn of it, whatever it is
                error = found
        return self._reducer.state(), error

    def _refuse_disagreement(self, rows: list[StepRow], operation: str, error: Exception | None, options: str) -> None:
        called = {row.operation for row in rows}
        doing = " and ".join(CALLS[number] for number in sorted(called))
        if any(row.failed for row in rows):
            agree(self._comm, error, doing=doing)
        if len({(row.operation, row.options) for row in rows}) > 1:
            agree(self._comm, None, {"the call": operation, "param_groups": options}, doing=doing)
        before = [row.passes_before for row in rows]
        if len(set(before)) > 1:
            raise ConsistencyError(
                f"{operation}: ranks ran different numbers of synchronising backwards in windows that were discarded, "
                f"by rank: {before}. Call backward, no_sync and zero_grad alike on all ranks"
            )

    def _check_params(self) -> None:
        thawed = [item.name for item in self._frozen if item.param.requires_grad]
        if thawed:
            raise LifecycleError(
                f"{listed(thawed)} had requires_grad=False when the optimizer was made, and is not managed; "
                "close() this optimizer and make a new one after thawing"
            )
        moved = [p.name for p in self._params if not self._lives_in_bucket(p)]
        if moved:
            raise LifecycleError(
                f"the data of {listed(moved)} was replaced after wrapping (p.data = ..., model.to(...)); "
                "write weights in place (p.copy_), or close() and wrap again"
            )

    def _lives_in_bucket(self, p: ManagedParam) -> bool:
        weights = self._buckets[p.bucket].memory.weights
        return p.param.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()


def options_text(param_groups: Sequence[dict[str, Any]]) -> str:
    """The options of all param groups in a form that can be compared between ranks."""
    return repr(
        [
            [(key, v.tolist() if isinstance(v, Tensor) else v) for key, v in sorted(group.items()) if key != "params"]
            for group in param_groups
        ]
    )
