"""What one rank owns of a bucket, part by part, and where each part's state lies.

State comes in three measures: by element, beside the weights; by row, one number for each row of a matrix; and by
matrix, one dict each. Each is laid out in the order of the parts, and the last two without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from freehold.plan import Slot
from freehold.runtime.params import ManagedParam

__all__ = ["ShardPart", "shard_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """One slot of a rank's shard.

    Attributes:
        slot: Where its elements lie.
        param: What it is part of.
        rows: ``[start, stop)`` among all matrix rows of the shard; empty for what is no matrix.
        matrices: ``[start, stop)`` among all matrices of the shard; what is no matrix counts as one.
    """

    slot: Slot
    param: ManagedParam
    rows: slice
    matrices: slice

    @property
    def elements(self) -> slice:
        """``[start, stop)`` among the elements of the shard."""
        return slice(self.slot.offset, self.slot.offset + self.slot.numel)

    @property
    def num_matrices(self) -> int:
        """How many whole matrices it consists of; 0 for what is no matrix."""
        return 0 if self.param.matrix_shape is None else self.matrices.stop - self.matrices.start

    @property
    def first_row(self) -> int:
        """Its first row among those of the param."""
        assert self.param.matrix_shape is not None, f"{self.param.name} has state per row, but is no matrix"
        return self.slot.start // self.param.matrix_shape[1]

    @property
    def first_matrix(self) -> int:
        """Its first matrix among those of the param."""
        return self.slot.start // (self.slot.numel // self.num_matrices)


def shard_parts(slots: Sequence[Slot], params: Iterable[ManagedParam]) -> tuple[ShardPart, ...]:
    """The parts of one rank's shard.

    Args:
        slots: Those of the rank, by offset.
        params: The bucket's, in any order.
    """
    by_name = {p.name: p for p in params}
    parts: list[ShardPart] = []
    row = matrix = 0
    for slot in slots:
        shape = by_name[slot.name].matrix_shape
        num_rows = 0 if shape is None else slot.numel // shape[1]
        num_matrices = 1 if shape is None else slot.numel // (shape[0] * shape[1])
        parts.append(
            ShardPart(
                slot=slot,
                param=by_name[slot.name],
                rows=slice(row, row + num_rows),
                matrices=slice(matrix, matrix + num_matrices),
            )
        )
        row, matrix = row + num_rows, matrix + num_matrices
    return tuple(parts)
