"""The layout in words: who updates what, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from freehold.plan import Layout, flop_costs, rank_costs
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.comm import Comm
from freehold.runtime.gradients import GradMemory, forecast
from freehold.runtime.routing import NamedParam, Route

_MAX_RANK_LINES = 16

__all__ = ["MemoryReport", "describe", "measure_memory", "predict_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes that one rank holds, by purpose.

    Attributes:
        param_bytes: Weights of all buckets, padding included.
        grad_bytes: Gradients of all buckets, padding included; with ``grad_memory="sharded"`` the owned parts, and the
            buffers that were needed at once.
        master_bytes: fp32 copies of the owned low-precision weights.
        state_bytes: State of the rules for what this rank owns.
    """

    param_bytes: int
    grad_bytes: int
    master_bytes: int
    state_bytes: int

    @property
    def optimizer_bytes(self) -> int:
        """Masters and state: what sharding saves."""
        return self.master_bytes + self.state_bytes


def measure_memory(buckets: Sequence[BucketBuffers]) -> MemoryReport:
    """The bytes really held, from the tensors."""
    return MemoryReport(
        param_bytes=sum(b.memory.weights.nbytes for b in buckets),
        grad_bytes=_grad_bytes(buckets),
        master_bytes=sum(b.memory.master.nbytes for b in buckets if b.master_is_copy),
        state_bytes=sum(_state_bytes(b) for b in buckets),
    )


def _grad_bytes(buckets: Sequence[BucketBuffers]) -> int:
    pool = buckets[0].grads.pool
    return sum(b.grads.nbytes for b in buckets) + (0 if pool is None else pool.held_bytes())


def _state_bytes(bucket: BucketBuffers) -> int:
    memory = bucket.memory
    objects = [value for kept in memory.per_matrix for value in kept.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in (*memory.state.values(), *memory.row_state.values(), *objects))


def predict_memory(
    layout: Layout,
    rank: int,
    *,
    state_fields: dict[str, int],
    itemsizes: dict[str, int],
    grad_itemsize: int = 4,
    grad_memory: GradMemory = "full",
) -> MemoryReport:
    """The bytes that a rank will hold, from the layout alone.

    Args:
        layout: The plan.
        rank: Whose bytes.
        state_fields: Tensors of state that the rule of each bucket mode keeps (``{"whole": 1, "flat": 2}`` for Muon and
            AdamW).
        itemsizes: Bytes an element of each dtype in the layout.
        grad_itemsize: Bytes an element of the reduction dtype.
        grad_memory: As for ``LayerwiseOptimizer``; with ``"sharded"``, for gradients that arrive in backward order.
    """
    params = grads = masters = state = 0
    for bucket in layout.buckets:
        itemsize = itemsizes[bucket.dtype]
        owned = bucket.slots_of_rank(rank)
        extent = owned[-1].offset + owned[-1].numel if owned else 0
        params += bucket.numel * itemsize
        held = bucket.numel if grad_memory == "full" else extent
        grads += held * max(grad_itemsize, 8 if itemsize == 8 else 0)
        masters += extent * 4 if itemsize < 4 else 0
        state += extent * max(4, itemsize) * state_fields[bucket.mode]
    if grad_memory == "sharded":
        grads += forecast(layout, itemsizes, grad_itemsize=grad_itemsize).pool_bytes
    return MemoryReport(param_bytes=params, grad_bytes=grads, master_bytes=masters, state_bytes=state)


def describe(
    layout: Layout, routes: Sequence[Route], frozen: Sequence[NamedParam], buckets: Sequence[BucketBuffers], comm: Comm
) -> str:
    """A table of every param's rule, owner and bucket, then each bucket and each rank in a line, then the memory.

    Flat params are spread over ranks; their owner column shows the range.
    """
    rows = [("param", "shape", "rule", "why", "bucket", "rank")]
    for r in routes:
        slots = layout.slots_of(r.named.name)
        ranks = f"{slots[0].rank}" if len(slots) == 1 else f"{slots[0].rank}-{slots[-1].rank}"
        bucket = layout.bucket_of(r.named.name).index
        shape = "x".join(map(str, r.named.param.shape)) or "scalar"
        rows.append((r.named.name, shape, r.kind, r.reason, str(bucket), ranks))
        rows += [(alias, shape, r.kind, f"tied to {r.named.name}", str(bucket), ranks) for alias in r.named.aliases]
    rows += [(item.name, "x".join(map(str, item.param.shape)), "none", "frozen", "-", "-") for item in frozen]
    lines = [
        *_columns(rows),
        "",
        *_bucket_lines(layout),
        "",
        *_rank_lines(layout, comm),
        "",
        _memory_line(layout, buckets),
    ]
    return "\n".join(lines)


def _memory_line(layout: Layout, buckets: Sequence[BucketBuffers]) -> str:
    report = measure_memory(buckets)
    parts = {
        "weights": report.param_bytes,
        "gradients": report.grad_bytes,
        "masters": report.master_bytes,
        "state": report.state_bytes,
    }
    held = ", ".join(f"{what} {size / 2**20:,.1f} MiB" for what, size in parts.items())
    if buckets[0].grads.pool is None:
        return f"this rank holds {held}"
    itemsizes = {b.bucket.dtype: b.memory.weights.itemsize for b in buckets}
    itemsize = max(b.grads.dtype.itemsize for b in buckets)
    peak = forecast(layout, itemsizes, grad_itemsize=itemsize).peak_bytes
    own = sum(b.grads.own.nbytes for b in buckets)
    return f"this rank holds {held}; in backward, gradients take up to {(own + peak) / 2**20:,.1f} MiB"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _bucket_lines(layout: Layout) -> list[str]:
    lines = [
        f"bucket {b.index}: {b.mode} {b.dtype}, {b.real_numel:,} elements in {b.numel:,} "
        f"({(b.numel - b.real_numel) / b.real_numel:.1%} padding)"
        for b in layout.buckets
    ]
    total = (
        f"{layout.real_numel:,} elements in {layout.numel:,} ({layout.padding_numel / layout.real_numel:.1%} padding)"
    )
    return [*lines, f"all: {len(layout.buckets)} buckets of policy {layout.policy!r}, {total}"]


def _rank_lines(layout: Layout, comm: Comm) -> list[str]:
    costs = rank_costs(layout, flop_costs(layout.params))
    whole = sum(costs) or 1
    if len(costs) > _MAX_RANK_LINES:
        spread = (
            f"least {min(costs) / whole:.2%}, most {max(costs) / whole:.2%}, this rank {costs[comm.rank] / whole:.2%}"
        )
        return [f"{len(costs)} ranks share the Newton-Schulz work: mean {1 / len(costs):.2%}, {spread}"]
    return [
        f"rank {rank}: {cost / whole:.1%} of the Newton-Schulz work{' (this rank)' if rank == comm.rank else ''}"
        for rank, cost in enumerate(costs)
    ]
