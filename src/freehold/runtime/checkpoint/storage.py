"""Where DCP's plans meet the file system: a ``StorageWriter`` and a ``StorageReader`` without pickle.

[Note: Two halves of a save]
DCP's own driver runs the first half on every rank, in the thread that called ``save``: it plans, and ``write_data``
takes hold of the tensors (of copies, if training goes on). Since the length of every file is known by then, results can
be given at once. The second half needs no collective, so it can run in a thread of its own: ``write_part`` writes this
rank's part, and the coordinator's ``commit`` writes the manifest and gives the directory its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from freehold.errors import CheckpointError
from freehold.runtime.checkpoint.boxes import flat_start
from freehold.runtime.checkpoint.folder import claim_folder
from freehold.runtime.checkpoint.manifest import Chunk, Manifest, TensorRecord, read_manifest
from freehold.runtime.checkpoint.tensor_file import FileRecord, Part, TensorFile, open_regular, read_into

__all__ = ["CheckpointReader", "PartWriter", "finish_streams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assignment:
    """What the coordinator tells a rank: the directory under construction, and the name of its part."""

    folder: str
    part: str


class PartWriter(StorageWriter):
    """Collects what one rank is to write; see the note above.

    Args:
        target: Path of the checkpoint once it is complete.
        copies: Take copies of the tensors, in CPU memory, because they will change before they are written.
    """

    def __init__(self, target: Path, *, copies: bool) -> None:
        self._target = target
        self._copies = copies
        self._part: str = ""
        self._file = TensorFile(())
        self.folder: Path | None = None
        self.tensors: dict[str, TensorRecord] = {}
        self.planner_data: Any = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do before the plans are known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: make the directory under construction, and give every rank its part."""
        self.folder = claim_folder(self._target)
        names = [f"part-{rank:05d}.safetensors" for rank in range(len(plans))]
        return [
            replace(plan, storage_data=_Assignment(folder=str(self.folder), part=name))
            for plan, name in zip(plans, names, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Take hold of the tensors and say where their bytes will be."""
        assignment: _Assignment = plan.storage_data
        self._part, self.folder = assignment.part, Path(assignment.folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder}, made by rank 0, is not visible here: checkpoints need a directory that all ranks share"
            )
        items = sorted(plan.items, key=lambda item: -_tensor_data(item).properties.dtype.itemsize)
        tensors = [planner.resolve_data(item) for item in items]
        finish_streams(tensor for tensor in tensors if isinstance(tensor, Tensor))
        parts = [
            Part(name=_name_in_file(item), tensor=self._held(tensor))
            for item, tensor in zip(items, tensors, strict=True)
            if isinstance(tensor, Tensor)
        ]
        self._file = TensorFile(parts)
        results = [
            WriteResult(index=item.index, size_in_bytes=part.num_bytes, storage_data=(self._part, offset))
            for item, part, offset in zip(items, parts, self._file.offsets, strict=True)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: keep what the manifest will say."""
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self.planner_data = metadata.planner_data
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{key} is no tensor"
            self.tensors[key] = _tensor_record(key, tensor, places)

    def write_part(self) -> FileRecord | None:
        """Write this rank's part, if it has one, and let go of the tensors. Not collective.

        Raises:
            OSError: The file system refused.
        """
        assert self.folder is not None, "the plan comes first"
        if not self._file.parts:
            return None
        try:
            return self._file.write(self.folder / self._part)
        finally:
            self._file = TensorFile(())

    def _held(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to("cpu", copy=True).contiguous() if self._copies else tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Paths are made by ``freehold.save``, not by DCP."""
        return False


def finish_streams(tensors: Iterable[Tensor]) -> None:
    """Make what all streams have written to these tensors visible to every thread."""
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _tensor_data(item: Any) -> Any:
    assert item.tensor_data is not None, "freehold's planner saves tensors only"
    return item.tensor_data


def _name_in_file(item: Any) -> str:
    data = _tensor_data(item)
    whole = tuple(data.chunk.sizes) == tuple(data.size)
    return item.index.fqn if whole else f"{item.index.fqn}[{flat_start(data.size, data.chunk.offsets)}:]"


def _tensor_record(key: str, tensor: TensorStorageMetadata, places: dict[Any, tuple[str, int]]) -> TensorRecord:
    chunks = [
        Chunk(
            file=places[MetadataIndex(key, chunk.offsets)][0],
            offset=places[MetadataIndex(key, chunk.offsets)][1],
            offsets=tuple(chunk.offsets),
            sizes=tuple(chunk.sizes),
        )
        for chunk in tensor.chunks
    ]
    return TensorRecord(dtype=tensor.properties.dtype, shape=tuple(tensor.size), chunks=tuple(chunks))


class CheckpointReader(StorageReader):
    """Reads a checkpoint for ``torch.distributed.checkpoint.load``, with freehold's planner or with DCP's own.

    Weights are found under ``model.<name>``. It trusts the checksums of the manifest only; ``freehold.load``
    checks those of the parts as well.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: When it is read: missing, damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._manifest: Manifest | None = None
        self._places: dict[Any, Chunk] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on, if one is given."""
        if checkpoint_id is not None:
            self._folder, self._manifest = Path(checkpoint_id), None

    def read_metadata(self) -> Metadata:
        """The manifest in DCP's terms."""
        self._manifest = self._manifest or read_manifest(self._folder)
        return _in_dcp_terms(self._manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember where the chunks are."""
        self._places = dict(metadata.storage_data)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index].file, []).append(item)
        for name, items in sorted(by_file.items()):
            descriptor = open_regular(self._folder / name)
            try:
                for item in sorted(items, key=lambda i: self._places[i.storage_index].offset):
                    self._read_item(descriptor, item, planner)
            finally:
                os.close(descriptor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.no_grad()
    def _read_item(self, descriptor: int, item: ReadItem, planner: LoadPlanner) -> None:
        assert self._manifest is not None, "read_metadata comes first"
        chunk = self._places[item.storage_index]
        dtype = self._manifest.tensors[item.storage_index.fqn].dtype
        target = planner.resolve_tensor(item).detach()
        # Whole rows of the chunk's first dim, from which the rest is cut; most often they are just what is wanted.
        first, num_rows = (item.storage_offsets[0], item.lengths[0]) if chunk.sizes else (0, 1)
        row_shape = chunk.sizes[1:]
        direct = (
            target.device.type == "cpu"
            and target.is_contiguous()
            and target.dtype == dtype
            and tuple(item.lengths[1:]) == row_shape
        )
        rows = target if direct else torch.empty((num_rows, *row_shape), dtype=dtype)
        row_bytes = rows.numel() * dtype.itemsize // max(1, num_rows)
        read_into(descriptor, chunk.offset + first * row_bytes, rows)
        if not direct:
            inner = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets[1:], item.lengths[1:], strict=True))
            target.copy_(rows[(slice(None), *inner)].reshape(target.shape))
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Paths are given to the constructor, not to DCP."""
        return False


def _in_dcp_terms(manifest: Manifest) -> Metadata:
    return Metadata(
        state_dict_metadata={key: _dcp_tensor(record) for key, record in manifest.tensors.items()},
        storage_data={
            MetadataIndex(key, chunk.offsets): chunk
            for key, record in manifest.tensors.items()
            for chunk in record.chunks
        },
    )


def _dcp_tensor(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in record.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=record.dtype), torch.Size(record.shape), chunks)
