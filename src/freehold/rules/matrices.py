"""The matrices of a span: fused weights cut apart, equal shapes at equal distances put into one strided view.

[Note: Splits]
A fused weight (QKV in one, gate and up in one, all heads in one) is several matrices below each other. ``split`` cuts
every matrix of a param by rows, and each part is orthogonalised, and its learning rate scaled, as if it were a param
of its own; momentum and decay do not know the difference, so the bits are those of separate params. The planner does:
a split param stays whole on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from torch import Tensor

from freehold.errors import RuleError
from freehold.rules.base import Block

__all__ = ["Batch", "Split", "batches", "check_split", "is_split", "is_split_scale"]

Split = int | tuple[int, ...] | None
"""Parts of equal rows, by number; the rows of each part; or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Matrices of one shape at equal distances, which one strided view can show.

    Attributes:
        offset: Where the first begins, in elements of the span.
        num_matrices: How many.
        stride: From one to the next.
        num_rows: ``M``.
        num_cols: ``N``.
        first_row: Rows of matrices before it in the span.
        scale: Factor of the update.
    """

    offset: int
    num_matrices: int
    stride: int
    num_rows: int
    num_cols: int
    first_row: int = 0
    scale: float = 1.0

    def view(self, flat: Tensor) -> Tensor:
        """``(n,)`` -> ``(num_matrices, num_rows, num_cols)``, sharing memory."""
        size = (self.num_matrices, self.num_rows, self.num_cols)
        return flat.as_strided(size, (self.stride, self.num_cols, 1), flat.storage_offset() + self.offset)

    def rows(self, by_row: Tensor) -> Tensor:
        """State by rows of the span -> ``(num_matrices, num_rows)``, sharing memory."""
        stop = self.first_row + self.num_matrices * self.num_rows
        return by_row[self.first_row : stop].view(self.num_matrices, self.num_rows)


@lru_cache(maxsize=4096)  # the blocks of a span are the same at every step
def batches(
    blocks: tuple[Block, ...], split: Split = None, split_scale: tuple[float, ...] | None = None
) -> tuple[Batch, ...]:
    """Cut the matrices of a span into batches, in order.

    Args:
        blocks: Those of the span.
        split: See [Note: Splits].
        split_scale: A factor for each part of a split.

    Raises:
        RuleError: A block that is no matrix, or that the split does not fit.

    Example:
        >>> qkv = (Block(offset=0, shape=(12, 8)),)
        >>> [(b.offset, b.num_matrices, b.num_rows) for b in batches(qkv, split=(8, 2, 2))]
        [(0, 1, 8), (64, 2, 2)]
    """
    found: list[Batch] = []
    for batch in _matrices(blocks, split, split_scale):
        last = found[-1] if found else None
        if last is not None and _shape(last) == _shape(batch):
            stride = last.stride if last.num_matrices > 1 else batch.offset - last.offset
            if batch.offset == last.offset + last.num_matrices * stride:
                found[-1] = replace(last, num_matrices=last.num_matrices + 1, stride=stride)
                continue
        found.append(batch)
    return tuple(found)


def _shape(batch: Batch) -> tuple[int, int, float]:
    return batch.num_rows, batch.num_cols, batch.scale


def _matrices(blocks: tuple[Block, ...], split: Split, split_scale: tuple[float, ...] | None) -> Iterator[Batch]:
    """Every matrix, as a batch of one."""
    first_row = 0
    for block in blocks:
        if len(block.shape) not in (2, 3):
            raise RuleError(f"matrix rules update (M, N) and stacks (E, M, N), got a block of shape {block.shape}")
        num_rows, num_cols = block.shape[-2:]
        parts = _part_rows(num_rows, split)
        scales = split_scale if split is not None and split_scale is not None else (1.0,) * len(parts)
        offset = block.offset
        for _ in range(block.num_matrices):
            for rows, scale in zip(parts, scales, strict=True):
                yield Batch(
                    offset=offset,
                    num_matrices=1,
                    stride=rows * num_cols,
                    num_rows=rows,
                    num_cols=num_cols,
                    first_row=first_row,
                    scale=scale,
                )
                offset, first_row = offset + rows * num_cols, first_row + rows


def _part_rows(num_rows: int, split: Split) -> tuple[int, ...]:
    problem = _split_problem(num_rows, split)
    if problem is not None:
        raise RuleError(problem)
    if split is None:
        return (num_rows,)
    return (num_rows // split,) * split if isinstance(split, int) else split


def _split_problem(num_rows: int, split: Split) -> str | None:
    if isinstance(split, int) and num_rows % split:
        return f"split={split} does not divide {num_rows} rows"
    if isinstance(split, tuple) and sum(split) != num_rows:
        return f"split={split} has {sum(split)} rows in all, the matrix has {num_rows}"
    return None


def check_split(rule: str, name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> None:
    """Raise ``RuleError`` if the options' split does not fit matrices ``(M, N)`` of a param.

    Example:
        >>> check_split("Muon", "attn.qkv.weight", (12, 8), {"split": (4, 4), "split_scale": None})
        Traceback (most recent call last):
        freehold.errors.RuleError: Muon: param 'attn.qkv.weight': split=(4, 4) has 8 rows in all, the matrix has 12
    """
    split, scales = options["split"], options["split_scale"]
    problem = _split_problem(shape[0], split)
    if problem is None and scales is not None:
        num_parts = 1 if split is None else split if isinstance(split, int) else len(split)
        if split is None or len(scales) != num_parts:
            problem = f"split_scale has {len(scales)} values, split={split} makes {num_parts} parts"
    if problem is not None:
        raise RuleError(f"{rule}: param {name!r}: {problem}")


def is_split(value: Any) -> bool:
    """Whether a value is what ``Split`` says."""
    if value is None or isinstance(value, int):
        return value is None or (value >= 1 and not isinstance(value, bool))
    return isinstance(value, tuple) and _all(cast("Sequence[Any]", value), int, 1)


def is_split_scale(value: Any) -> bool:
    """Whether a value is a tuple of factors, or none."""
    return value is None or (isinstance(value, tuple) and _all(cast("Sequence[Any]", value), (int, float), 0))


def _all(items: Sequence[Any], kind: Any, least: float) -> bool:
    return len(items) > 0 and all(
        isinstance(item, kind) and not isinstance(item, bool) and item >= least for item in items
    )
