"""The owner's work in a step: cut its shards into spans and run the rules over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from freehold.plan import Slot
from freehold.rules import Block, Rule, Span
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.params import ManagedParam

__all__ = ["allocate_state", "refresh_masters", "update_bucket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One owned slot and its param."""

    slot: Slot
    param: ManagedParam

    def block(self, span_start: int) -> Block:
        offset = self.slot.offset - span_start
        if self.param.matrix_shape is None:
            return Block(offset=offset, shape=(self.slot.numel,))
        rows, cols = self.param.matrix_shape
        num_matrices = self.slot.numel // (rows * cols)
        return Block(offset=offset, shape=(rows, cols) if num_matrices == 1 else (num_matrices, rows, cols))

    @property
    def num_rows(self) -> int:
        """Rows of its matrices, as state by row counts them; 0 of a param that is no matrix."""
        return 0 if self.param.matrix_shape is None else self.slot.numel // self.param.matrix_shape[1]

    @property
    def num_dicts(self) -> int:
        """Matrices in it, as state in objects counts them; 1 of a param that is no matrix."""
        shape = self.param.matrix_shape
        return 1 if shape is None else self.slot.numel // (shape[0] * shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    """Where a run of pieces lies: elements, rows and matrices, each ``[start, stop)`` in the own shard."""

    elements: slice
    rows: slice
    matrices: slice


def _pieces(bucket: BucketBuffers, params_by_name: Mapping[str, ManagedParam]) -> list[_Piece]:
    return [_Piece(slot=slot, param=params_by_name[slot.name]) for slot in bucket.owned]


def allocate_state(bucket: BucketBuffers, rules: Sequence[Rule]) -> None:
    """Give the own shard zeroed tensors, and empty dicts, for all that a rule of this bucket declares."""
    pieces = _pieces(bucket, {p.name: p for p in bucket.params})
    memory = bucket.memory
    num_rows = sum(piece.num_rows for piece in pieces)
    for rule in rules:
        for state_field in rule.state_fields():
            if state_field.per == "row":
                memory.row_state.setdefault(state_field.name, memory.master.new_zeros(num_rows))
            elif state_field.name not in memory.state:
                memory.state[state_field.name] = torch.zeros_like(memory.master)
        if rule.keeps_objects and not memory.per_matrix:
            memory.per_matrix.extend({} for _ in range(sum(piece.num_dicts for piece in pieces)))


def refresh_masters(bucket: BucketBuffers, params_by_name: Mapping[str, ManagedParam], written: set[int]) -> None:
    """Take over weights that the user wrote since the last step, where weights are kept a second time."""
    if not bucket.master_is_copy:
        return
    for slot in bucket.owned:
        if params_by_name[slot.name].index in written:
            part = slice(slot.offset, slot.offset + slot.numel)
            master, weights = bucket.memory.master[part], bucket.memory.own_weights[part]
            # A weight that is the master, rounded, was not changed: a state dict that is loaded back keeps masters.
            master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights))


def update_bucket(
    bucket: BucketBuffers,
    params_by_name: Mapping[str, ManagedParam],
    used: set[int],
    groups: Sequence[dict[str, Any]],
    rules: Mapping[str, Rule],
) -> None:
    """Update the used params of the own shard, masters first, and write the weights.

    Args:
        bucket: Its gradients are reduced.
        params_by_name: All managed params.
        used: Indices of the params that some rank used in this window; all others stay as they are, bit for bit.
        groups: The live param groups, which hold each param's options.
        rules: The rule of each kind.
    """
    pieces = _pieces(bucket, params_by_name)
    runs = _runs([piece for piece in pieces if piece.param.index in used])
    if not runs:
        return
    grads = (
        bucket.grads.own
        if bucket.grads.dtype == bucket.memory.master.dtype
        else bucket.grads.own.to(bucket.memory.master.dtype)
    )
    for run, extent in zip(runs, _extents(pieces, runs), strict=True):
        group = groups[run[0].param.group]
        rules[group["rule"]].update(_span(bucket, run, extent, grads), group)
    if any(piece.slot.offset > last.slot.offset + last.slot.numel for run in runs for last, piece in pairwise(run)):
        bucket.grads.own.zero_()  # rules leave anything there; alignment padding must be 0 in the next window
    if bucket.master_is_copy:
        bucket.memory.own_weights.copy_(bucket.memory.master)


def _span(bucket: BucketBuffers, run: list[_Piece], extent: _Extent, grads: torch.Tensor) -> Span:
    memory = bucket.memory
    by_element = {name: tensor[extent.elements] for name, tensor in memory.state.items()}
    by_row = {name: tensor[extent.rows] for name, tensor in memory.row_state.items()}
    return Span(
        param=memory.master[extent.elements],
        grad=grads[extent.elements],
        state=by_element | by_row,
        blocks=tuple(piece.block(extent.elements.start) for piece in run),
        step=run[0].param.num_steps + 1,
        per_matrix=tuple(memory.per_matrix[extent.matrices]),
    )


def _extents(pieces: list[_Piece], runs: list[list[_Piece]]) -> list[_Extent]:
    """The extent of every run among all pieces of the shard; both are by offset."""
    starts: dict[int, tuple[int, int]] = {}
    num_rows = num_matrices = 0
    for piece in pieces:
        starts[piece.slot.offset] = (num_rows, num_matrices)
        num_rows, num_matrices = num_rows + piece.num_rows, num_matrices + piece.num_dicts
    extents: list[_Extent] = []
    for run in runs:
        first, last = run[0].slot, run[-1].slot
        row, matrix = starts[first.offset]
        last_row, last_matrix = starts[last.offset]
        extents.append(
            _Extent(
                elements=slice(first.offset, last.offset + last.numel),
                rows=slice(row, last_row + run[-1].num_rows),
                matrices=slice(matrix, last_matrix + run[-1].num_dicts),
            )
        )
    return extents


def _runs(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Neighbours that one call of a rule can update: same options, same step count, nothing but alignment between."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and _joins(last, piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _joins(last: _Piece, piece: _Piece) -> bool:
    gap = piece.slot.offset - (last.slot.offset + last.slot.numel)
    same = (last.param.group, last.param.num_steps) == (piece.param.group, piece.param.num_steps)
    return same and gap < 64
