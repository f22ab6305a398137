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


def allocate_state(bucket: BucketBuffers, rules: Sequence[Rule]) -> None:
    """Give the own shard zeroed tensors for every field that a rule of this bucket declares."""
    for rule in rules:
        for state_field in rule.state_fields():
            if state_field.name not in bucket.memory.state:
                bucket.memory.state[state_field.name] = torch.zeros_like(bucket.memory.master)


def refresh_masters(bucket: BucketBuffers, params_by_name: Mapping[str, ManagedParam], written: set[int]) -> None:
    """Take over weights that the user wrote since the last step, where weights are kept a second time."""
    if not bucket.master_is_copy:
        return
    for slot in bucket.owned:
        if params_by_name[slot.name].index in written:
            part = slice(slot.offset, slot.offset + slot.numel)
            bucket.memory.master[part].copy_(bucket.memory.own_weights[part])


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
    pieces = [_Piece(slot=slot, param=params_by_name[slot.name]) for slot in bucket.owned]
    runs = _runs([piece for piece in pieces if piece.param.index in used])
    if not runs:
        return
    grads = (
        bucket.memory.own_grads
        if bucket.memory.own_grads.dtype == bucket.memory.master.dtype
        else bucket.memory.own_grads.to(bucket.memory.master.dtype)
    )
    for run in runs:
        start, stop = run[0].slot.offset, run[-1].slot.offset + run[-1].slot.numel
        group = groups[run[0].param.group]
        span = Span(
            param=bucket.memory.master[start:stop],
            grad=grads[start:stop],
            state={name: tensor[start:stop] for name, tensor in bucket.memory.state.items()},
            blocks=tuple(piece.block(start) for piece in run),
            step=run[0].param.num_steps + 1,
        )
        rules[group["rule"]].update(span, group)
    if any(piece.slot.offset > last.slot.offset + last.slot.numel for run in runs for last, piece in pairwise(run)):
        bucket.memory.own_grads.zero_()  # rules leave anything there; alignment padding must be 0 in the next window
    if bucket.master_is_copy:
        bucket.memory.own_weights.copy_(bucket.memory.master)


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
