"""Ranks never part: what one of them refuses, all refuse.

Before anything collective, each rank checks its own side, catches what it finds, and joins one exchange; then all raise
the same error or none does. A rank that simply raised would leave the others in a collective that never ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freehold import errors
from freehold.errors import ConsistencyError, FreeholdError
from freehold.runtime.comm import Comm

__all__ = ["CALLS", "Report", "StepRow", "agree", "exchange_step_rows", "passes_needed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank tells the others: an error found, and values that must be equal everywhere, by what they are."""

    error_type: str = ""
    message: str = ""
    values: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, error: Exception | None, values: dict[str, str] | None = None) -> Report:
        """A report on ``error`` (or on none) and the values to compare."""
        pairs = tuple((values or {}).items())
        if error is None:
            return cls(values=pairs)
        return cls(error_type=type(error).__name__, message=str(error), values=pairs)


def agree(comm: Comm, error: Exception | None, values: dict[str, str] | None = None, *, doing: str) -> None:
    """Join the group's exchange and raise on every rank if any rank found an error or a value differs.

    Args:
        comm: The group; every rank of it must make this call.
        error: What this rank found, or ``None``.
        values: What must be equal on all ranks, by its name.
        doing: What was attempted, for the message.

    Raises:
        FreeholdError: The class of the lowest refusing rank's error where it is one of freehold's own, else
            ``ConsistencyError``; the text names the ranks. On the rank where it arose, the original is the cause.
    """
    reports: list[Report] = comm.gather_objects(Report.of(error, values))
    refused = {rank: report for rank, report in enumerate(reports) if report.error_type}
    if refused:
        raise _refusal(refused, comm.num_ranks, doing) from error
    if not any(report.values for report in reports):
        return
    differing = _differences(reports)
    if differing:
        raise ConsistencyError(f"{doing}: ranks disagree: " + "; ".join(differing))


def _refusal(refused: dict[int, Report], num_ranks: int, doing: str) -> FreeholdError:
    first = next(iter(refused.values()))
    kind = getattr(errors, first.error_type) if first.error_type in errors.__all__ else None
    texts = {report.message for report in refused.values()}
    if num_ranks == 1 or (len(texts) == 1 and len(refused) == num_ranks):
        text = first.message
    else:
        text = "; ".join(f"rank {rank}: {report.message}" for rank, report in refused.items())
    if kind is None:
        kind, text = ConsistencyError, f"{doing}: {first.error_type}: {text}"
    return kind(text)


def _differences(reports: list[Report]) -> list[str]:
    found: list[str] = []
    tables = [dict(report.values) for report in reports]
    for name in tables[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            ranks_by_value.setdefault(table.get(name, "(absent)"), []).append(rank)
        if len(ranks_by_value) > 1:
            shown = ", ".join(f"ranks {ranks}: {value}" for value, ranks in ranks_by_value.items())
            found.append(f"{name} ({shown})")
    return found


CALLS = ("step", "clip_grad_norm_", "unscale_", "save", "load", "state_dict", "load_state_dict", "verify")
"""What ranks call together, at a time of their choosing: ranks in two different ones of these find each other out."""

_STEP_FIELDS = ("operation", "failed", "options", "passes_before", "passes", "pending", "plain", "written")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """What one rank says before gradients are used; small enough to be exchanged at every step.

    Attributes:
        operation: Which call this is: its place in ``CALLS``.
        failed: The rank found an error.
        options: A checksum of the param groups' options.
        passes_before: Passes in earlier windows.
        passes: Passes in this window.
        pending: Gradients wait for a further pass.
        plain: Every param was used.
        written: The user wrote some weights since the last step.
    """

    operation: int
    failed: bool
    options: int
    passes_before: int
    passes: int
    pending: bool
    plain: bool
    written: bool


def exchange_step_rows(comm: Comm, row: StepRow) -> list[StepRow]:
    """Every rank's row, by rank."""
    sent = torch.tensor([int(getattr(row, name)) for name in _STEP_FIELDS], dtype=torch.int64)
    return [StepRow(**dict(zip(_STEP_FIELDS, values, strict=True))) for values in comm.exchange(sent).tolist()]


def passes_needed(rows: list[StepRow]) -> int:
    """How many passes this window has on every rank, once those that are behind have caught up."""
    return max(row.passes + row.pending for row in rows)
