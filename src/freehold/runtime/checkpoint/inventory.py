"""What a model and its optimizer consist of, by name: the pieces that this rank holds, as views of live memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from freehold.errors import CheckpointError
from freehold.rules import StateField
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.checkpoint.boxes import boxes_of
from freehold.runtime.checkpoint.dtypes import DTYPE_NAMES
from freehold.runtime.params import ManagedParam

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["Inventory", "Piece", "Schema", "model_key", "optim_key", "schemas_of", "state_of", "take_inventory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What a saved tensor must look like, and what it is.

    Attributes:
        name: Of the param or buffer.
        field: ``"master"`` or a field of the rule's state; empty for the weight or buffer itself.
        dtype: Of the tensor.
        shape: Of the full tensor.
        bare: It is neither, and ``name`` is the whole key.
    """

    name: str
    field: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bare: bool = False

    @property
    def key(self) -> str:
        """Under which it is saved."""
        if self.bare:
            return self.name
        return optim_key(self.name, self.field) if self.field else model_key(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a named tensor, and the memory that holds it on this rank.

    Attributes:
        schema: Of the full tensor.
        offsets: First index of the box in each dim.
        tensor: Its values, in the shape of the box; a view where it can be one.
    """

    schema: Schema
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def key(self) -> str:
        """Under which the tensor is saved."""
        return self.schema.key


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Everything that a checkpoint of this model and optimizer holds, or should.

    Attributes:
        schemas: Every tensor by key, the same on all ranks.
        owned: The pieces that this rank alone holds.
        replicas: Whole tensors that every rank holds; group rank 0 saves them, all load them.
        tied: Further names in the model, and the name that each is saved under.
        objects: What rules keep per matrix, for the params of which this rank owns matrices: a dict for each, and the
            index of the first one in its param.
    """

    schemas: dict[str, Schema] = field(default_factory=dict)
    owned: list[Piece] = field(default_factory=list)
    replicas: list[Piece] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    objects: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)


def model_key(name: str) -> str:
    """Under which a weight or buffer is saved."""
    return f"model.{name}"


def optim_key(name: str, field_name: str) -> str:
    """Under which a param's master or state is saved."""
    return f"optim.{name}.{field_name}"


def take_inventory(model: nn.Module | None, opt: LayerwiseOptimizer) -> Inventory:
    """List what a checkpoint holds. Local; weights must be current.

    Args:
        model: The model of ``opt``, or ``None`` for the optimizer's part alone.
        opt: Not closed.

    Raises:
        CheckpointError: The model is not the optimizer's, or holds what cannot be saved.
    """
    inventory = Inventory()
    if model is not None:
        _check_model(model, opt)
        _list_model(model, {id(p.param) for p in opt._params}, inventory)
    for p in opt._params:
        bucket = opt._buckets[p.bucket]
        schemas = schemas_of(p, bucket, state_of(opt, p))
        inventory.schemas |= {schema.key: schema for schema in schemas if schema.field or model is not None}
    for bucket in opt._buckets:
        _list_bucket(bucket, opt, inventory)
    return inventory


def state_of(opt: LayerwiseOptimizer, p: ManagedParam) -> tuple[StateField, ...]:
    """The state that the rule of a param keeps."""
    return opt._options.rules[opt.param_groups[p.group]["rule"]].state_fields()


# ---- the model ---------------------------------------------------------------------------------------------------


def _check_model(model: nn.Module, opt: LayerwiseOptimizer) -> None:
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"expected the model as an nn.Module, got {type(model).__name__}")
    silent = [name for name, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    if silent:
        warnings.warn(
            f"modules {silent[:5]} have extra state (get_extra_state), which is not saved; put it into extra=",
            stacklevel=2,
        )
    named = dict(model.named_parameters(remove_duplicate=False))
    foreign = [p.name for p in opt._params if named.get(p.name) is not p.param]
    if foreign:
        raise CheckpointError(
            f"the optimizer manages {foreign[0]!r}" + (f" and {len(foreign) - 1} more" if foreign[1:] else "") + ", "
            "which this model does not have under that name: pass the model that the optimizer was made with"
        )


def _list_model(model: nn.Module, managed: set[int], inventory: Inventory) -> None:
    seen: dict[int, str] = {}
    for name, tensor in _saved_tensors(model):
        if id(tensor) in seen:
            inventory.tied[name] = seen[id(tensor)]
            continue
        seen[id(tensor)] = name
        if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES or tensor.is_meta:
            raise CheckpointError(f"{name!r} is a tensor of {tensor.layout}, {tensor.dtype} on {tensor.device}")
        schema = Schema(name=name, field="", dtype=tensor.dtype, shape=tuple(tensor.shape))
        inventory.schemas[schema.key] = schema
        if id(tensor) not in managed:
            inventory.replicas.append(Piece(schema=schema, offsets=(0,) * tensor.ndim, tensor=tensor.detach()))


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Params and persistent buffers by qualified name, tied ones under each name."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


# ---- the optimizer -----------------------------------------------------------------------------------------------


def schemas_of(p: ManagedParam, bucket: BucketBuffers, fields: Iterable[StateField]) -> list[Schema]:
    """The weight of a param, its master if that is a copy, and its state."""
    shape, master = tuple(p.param.shape), bucket.memory.master.dtype
    schemas = [Schema(name=p.name, field="", dtype=p.param.dtype, shape=shape)]
    if bucket.master_is_copy:
        schemas.append(Schema(name=p.name, field="master", dtype=master, shape=shape))
    for item in fields:
        full = _row_shape(p) if item.per == "row" else shape
        schemas.append(Schema(name=p.name, field=item.name, dtype=master, shape=full))
    return schemas


def _row_shape(p: ManagedParam) -> tuple[int, ...]:
    """``(M,)`` for a matrix, ``(E, M)`` for a stack; convolution weights are one matrix."""
    assert p.matrix_shape is not None, f"{p.name} has state per row, but is no matrix"
    rows, cols = p.matrix_shape
    num_matrices = p.param.numel() // (rows * cols)
    return (rows,) if num_matrices == 1 else (num_matrices, rows)


def _list_bucket(bucket: BucketBuffers, opt: LayerwiseOptimizer, inventory: Inventory) -> None:
    """The pieces in the own shard."""
    for part in bucket.parts:
        p = part.param
        fields = state_of(opt, p)
        per_row = {item.name for item in fields if item.per == "row"}
        for schema in schemas_of(p, bucket, fields):
            if schema.key not in inventory.schemas:
                continue
            if schema.field in per_row:
                flat = bucket.memory.row_state[schema.field][part.rows]
                inventory.owned += _pieces(schema, flat, part.first_row)
            else:
                flat = _element_memory(bucket, schema.field)[part.elements]
                inventory.owned += _pieces(schema, flat, part.slot.start)
        kept = bucket.memory.per_matrix[part.matrices]
        if part.num_matrices and kept:
            inventory.objects[p.name] = (part.first_matrix, kept)
        elif any(kept):
            raise CheckpointError(
                f"the rule of param {p.name!r} keeps objects for a part of it that shard edges cut out; that cannot be "
                "loaded at another number of ranks. Use rules that keep objects for matrices only"
            )


def _element_memory(bucket: BucketBuffers, field_name: str) -> Tensor:
    if not field_name:
        return bucket.memory.own_weights
    return bucket.memory.master if field_name == "master" else bucket.memory.state[field_name]


def _pieces(schema: Schema, flat: Tensor, start: int) -> list[Piece]:
    """The boxes of a tensor of which ``flat`` holds the elements from ``start`` on."""
    pieces: list[Piece] = []
    for box in boxes_of(schema.shape, start, start + flat.numel()):
        tensor = flat[box.start - start : box.start - start + box.numel].view(box.sizes)
        pieces.append(Piece(schema=schema, offsets=box.offsets, tensor=tensor))
    return pieces
