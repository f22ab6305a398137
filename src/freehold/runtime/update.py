"""The owner's work in a step: cut its shards into spans and run the rules over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from freehold.rules import Block, Rule, Span
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.shard import ShardPart

__all__ = ["allocate_state", "refresh_masters", "update_bucket"]


def allocate_state(bucket: BucketBuffers, rules: Sequence[Rule]) -> None:
    """Give the own shard zeroed tensors, and empty dicts, for all that a rule of this bucket declares."""
    memory = bucket.memory
    num_rows = bucket.parts[-1].rows.stop if bucket.parts else 0
    num_dicts = bucket.parts[-1].matrices.stop if bucket.parts else 0
    for rule in rules:
        for state_field in rule.state_fields():
            if state_field.per == "row":
                memory.row_state.setdefault(state_field.name, memory.master.new_zeros(num_rows))
            elif state_field.name not in memory.state:
                memory.state[state_field.name] = torch.zeros_like(memory.master)
        if rule.keeps_objects and not memory.per_matrix:
            memory.per_matrix.extend({} for _ in range(num_dicts))


def refresh_masters(bucket: BucketBuffers, written: set[int]) -> None:
    """Take over weights, by index of their params, that the user wrote, where weights are kept a second time."""
    if not bucket.master_is_copy:
        return
    for part in bucket.parts:
        if part.param.index in written:
            master, weights = bucket.memory.master[part.elements], bucket.memory.own_weights[part.elements]
            # A weight that is the master, rounded, was not changed: a state dict that is loaded back keeps masters.
            master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights))


def update_bucket(
    bucket: BucketBuffers, used: set[int], groups: Sequence[dict[str, Any]], rules: Mapping[str, Rule]
) -> None:
    """Update the used params of the own shard, masters first, and write the weights.

    Args:
        bucket: Its gradients are reduced.
        used: Indices of the params that some rank used in this window; all others stay as they are, bit for bit.
        groups: The live param groups, which hold each param's options.
        rules: The rule of each kind.
    """
    runs = _runs([part for part in bucket.parts if part.param.index in used])
    if not runs:
        return
    grads = (
        bucket.grads.own
        if bucket.grads.dtype == bucket.memory.master.dtype
        else bucket.grads.own.to(bucket.memory.master.dtype)
    )
    for run in runs:
        group = groups[run[0].param.group]
        rules[group["rule"]].update(_span(bucket, run, grads), group)
    if any(part.elements.start > last.elements.stop for run in runs for last, part in pairwise(run)):
        bucket.grads.own.zero_()  # rules leave anything there; alignment padding must be 0 in the next window
    if bucket.master_is_copy:
        bucket.memory.own_weights.copy_(bucket.memory.master)


def _span(bucket: BucketBuffers, run: list[ShardPart], grads: torch.Tensor) -> Span:
    memory = bucket.memory
    elements = slice(run[0].elements.start, run[-1].elements.stop)
    rows = slice(run[0].rows.start, run[-1].rows.stop)
    by_element = {name: tensor[elements] for name, tensor in memory.state.items()}
    by_row = {name: tensor[rows] for name, tensor in memory.row_state.items()}
    return Span(
        param=memory.master[elements],
        grad=grads[elements],
        state=by_element | by_row,
        blocks=tuple(_block(part, elements.start) for part in run),
        step=run[0].param.num_steps + 1,
        per_matrix=tuple(memory.per_matrix[run[0].matrices.start : run[-1].matrices.stop]),
    )


def _block(part: ShardPart, span_start: int) -> Block:
    offset, shape = part.slot.offset - span_start, part.param.matrix_shape
    if shape is None:
        return Block(offset=offset, shape=(part.slot.numel,))
    return Block(offset=offset, shape=shape if part.num_matrices == 1 else (part.num_matrices, *shape))


def _runs(parts: list[ShardPart]) -> list[list[ShardPart]]:
    """Neighbours that one call of a rule can update: same options, same step count, nothing but alignment between."""
    runs: list[list[ShardPart]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if last is not None and _joins(last, part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _joins(last: ShardPart, part: ShardPart) -> bool:
    gap = part.elements.start - last.elements.stop
    same = (last.param.group, last.param.num_steps) == (part.param.group, part.param.num_steps)
    return same and gap < 64
