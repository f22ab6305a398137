"""DCP planners for pieces: each rank says which boxes it holds, nobody needs to know how they came about."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from freehold.errors import CheckpointError
from freehold.runtime.checkpoint.boxes import tiles
from freehold.runtime.checkpoint.inventory import Piece, Schema

__all__ = ["PieceLoadPlanner", "PieceSavePlanner"]


class PieceSavePlanner(SavePlanner):
    """Saves pieces; the state dict that DCP passes around is not used.

    Args:
        pieces: What this rank saves, each box once over all ranks.
        schemas: What all ranks together must save; more is allowed.
        planner_data: Goes to the coordinator, which finds the list of all ranks' in ``Metadata.planner_data``.
    """

    def __init__(self, pieces: Sequence[Piece], schemas: Mapping[str, Schema], planner_data: Any) -> None:
        self._pieces = {MetadataIndex(piece.key, piece.offsets): piece for piece in pieces}
        self._schemas = schemas
        self._planner_data = planner_data

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Everything is known already."""

    def create_local_plan(self) -> SavePlan:
        """One item a piece."""
        items = [_write_item(index, piece) for index, piece in self._pieces.items()]
        return SavePlan(items=items, planner_data=self._planner_data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Put all ranks' chunks together, and check that they cover every tensor once."""
        tensors = {key: _metadata(schema) for key, schema in self._schemas.items()}
        for plan in all_plans:
            for item in plan.items:
                data = item.tensor_data
                assert data is not None, "pieces are tensors"
                saved = TensorStorageMetadata(data.properties, data.size, [])
                tensors.setdefault(item.index.fqn, saved).chunks.append(data.chunk)
        for key, tensor in tensors.items():
            if not tiles(tensor.size, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
                raise CheckpointError(f"the ranks' pieces of {key!r} do not add up to its shape {tuple(tensor.size)}")
        plans = [replace(plan, planner_data=None) for plan in all_plans]
        data_of_ranks = [plan.planner_data for plan in all_plans]
        return plans, Metadata(state_dict_metadata=dict(tensors), planner_data=data_of_ranks)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As the coordinator sent it."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The piece, a view of live memory."""
        return self._pieces[write_item.index].tensor


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape),
            properties=TensorProperties(dtype=piece.schema.dtype),
            size=torch.Size(piece.schema.shape),
        ),
    )


def _metadata(schema: Schema) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=schema.dtype), torch.Size(schema.shape), [])


class PieceLoadPlanner(LoadPlanner):
    """Fills pieces in place.

    Args:
        pieces: What this rank wants, each with the key under which it was saved.
    """

    def __init__(self, pieces: Sequence[tuple[str, Piece]]) -> None:
        self._pieces = {MetadataIndex(key, piece.offsets): piece.tensor for key, piece in pieces}
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Learn what was saved."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """For every piece, the saved chunks that it overlaps."""
        assert self._metadata is not None, "set_up_planner comes first"
        items: list[ReadItem] = []
        for index, tensor in self._pieces.items():
            saved = self._metadata.state_dict_metadata[index.fqn]
            assert isinstance(saved, TensorStorageMetadata), f"{index.fqn} is no tensor"
            if tensor.dtype != saved.properties.dtype:  # DCP itself would cast, silently
                raise CheckpointError(f"{index.fqn!r} was saved as {saved.properties.dtype}, not {tensor.dtype}")
            if tensor.numel() == 0:
                continue
            wanted = ChunkStorageMetadata(offsets=index.offset or torch.Size(()), sizes=tensor.shape)
            items += create_read_items_for_chunk_list(index.fqn, saved, [wanted])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: nothing is saved as bytes."""
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is saved as bytes, which are never loaded")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a piece that a chunk fills."""
        tensor = self._pieces[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: it was filled in place."""
