from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from freehold.rules import Block, Rule, Span

ALIGNMENT = 64


@dataclass(frozen=True)
class FlatParams:
    """Params laid out as a bucket's shard lays them out, driven through a rule step by step."""

    rule: Rule
    options: Mapping[str, Any]
    blocks: tuple[Block, ...]
    param: Tensor
    state: dict[str, Tensor]
    row_state: dict[str, Tensor]
    per_matrix: list[dict[str, Any]]

    @classmethod
    def of(cls, rule: Rule, params: Sequence[Tensor], options: Mapping[str, Any] | None = None) -> FlatParams:
        sizes = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in params]
        offsets = [0, *itertools.accumulate(sizes)]
        blocks = tuple(Block(offset=offset, shape=tuple(p.shape)) for offset, p in zip(offsets, params, strict=False))
        zeros = torch.zeros(offsets[-1], dtype=params[0].dtype)
        flat = cls(
            rule=rule,
            options=rule.defaults() if options is None else options,
            blocks=blocks,
            param=zeros.clone(),
            state={field.name: zeros.clone() for field in rule.state_fields() if field.per == "element"},
            row_state={
                field.name: zeros.new_zeros(sum(b.num_rows for b in blocks))
                for field in rule.state_fields()
                if field.per == "row"
            },
            per_matrix=[{} for _ in range(sum(b.num_matrices for b in blocks))] if rule.keeps_objects else [],
        )
        flat.param.copy_(flat.flatten(params))
        return flat

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.zeros_like(self.param)
        for block, tensor in zip(self.blocks, tensors, strict=True):
            flat[block.offset : block.offset + tensor.numel()] = tensor.flatten()
        return flat

    def split(self, flat: Tensor) -> list[Tensor]:
        return [flat[b.offset : b.offset + prod(b.shape)].view(b.shape) for b in self.blocks]

    def padding(self, flat: Tensor) -> Tensor:
        is_padding = torch.ones_like(flat, dtype=torch.bool)
        for block in self.blocks:
            is_padding[block.offset : block.offset + prod(block.shape)] = False
        return flat[is_padding]

    def update(self, grads: Sequence[Tensor], step: int, cuts: Sequence[int] = ()) -> Tensor:
        """Update all params, as one span or cut into several; returns the gradient buffer (now scratch)."""
        grad = self.flatten(grads)
        for start, stop in itertools.pairwise([0, *cuts, self.param.numel()]):
            self.rule.update(self.span(grad, step, start, stop), self.options)
        return grad

    def span(self, grad: Tensor, step: int, start: int, stop: int) -> Span:
        before = [block for block in self.blocks if block.offset < start]
        inside = _blocks_between(self.blocks, start, stop)
        is_matrix = self.rule.kind == "matrix"
        row = sum(block.num_rows for block in before) if is_matrix else 0
        num_rows = sum(block.num_rows for block in inside) if is_matrix else 0
        matrix = sum(block.num_matrices for block in before)
        num_matrices = sum(block.num_matrices for block in inside)
        return Span(
            param=self.param[start:stop],
            grad=grad[start:stop],
            state={name: tensor[start:stop] for name, tensor in self.state.items()}
            | {name: tensor[row : row + num_rows] for name, tensor in self.row_state.items()},
            blocks=inside,
            step=step,
            per_matrix=tuple(self.per_matrix[matrix : matrix + num_matrices]),
        )

    def kept(self) -> dict[str, Tensor]:
        """All state tensors by a name that is unique."""
        objects = {
            f"{name} {index}": value
            for index, state in enumerate(self.per_matrix)
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        return self.state | self.row_state | objects


def _blocks_between(blocks: tuple[Block, ...], start: int, stop: int) -> tuple[Block, ...]:
    inside: list[Block] = []
    for block in blocks:
        first, last = max(block.offset, start), min(block.offset + prod(block.shape), stop)
        if first < last:
            shape = block.shape if last - first == prod(block.shape) else (last - first,)
            inside.append(Block(offset=first - start, shape=shape))
    return tuple(inside)


@pytest.fixture(name="flat_params")
def _flat_params() -> type[FlatParams]:
    return FlatParams


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)
