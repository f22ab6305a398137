"""``save`` and ``async_save``: from live memory to a complete checkpoint, in two halves."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from freehold.errors import CheckpointError, PlanTypeError
from freehold.runtime.agreement import agree
from freehold.runtime.checkpoint.draft import Draft, digest, draft_of, objects_of, value_piece, with_objects
from freehold.runtime.checkpoint.driver import drive_save
from freehold.runtime.checkpoint.folder import discard, prune, publish, telling
from freehold.runtime.checkpoint.inventory import Inventory, Piece, take_inventory
from freehold.runtime.checkpoint.manifest import Manifest
from freehold.runtime.checkpoint.meeting import meet
from freehold.runtime.checkpoint.patience import on_all, wait_for_all
from freehold.runtime.checkpoint.planner import PieceSavePlanner
from freehold.runtime.checkpoint.storage import PartWriter
from freehold.runtime.checkpoint.tensor_file import FileRecord
from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["Saving", "async_save", "during", "save", "settle_pending"]

_log = logging.getLogger("freehold")
_pending: weakref.WeakKeyDictionary[LayerwiseOptimizer, Saving] = weakref.WeakKeyDictionary()

_POLL_S = 0.05
_EXIT_PATIENCE_S = 60.0  # a process that ends waits no longer than this for the other ranks' parts


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    opt: LayerwiseOptimizer,
    *,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint and return when it is complete and on disk. Collective.

    It holds all weights and buffers of the model, fp32 masters, the rules' state, step counters and the options of the
    param groups, by name. Every rank writes what it owns; buffers such as those of BatchNorm are group rank 0's. It can
    be loaded with any number of ranks, bucket size and policy. Gradients are not saved.

    Args:
        path: The directory that becomes the checkpoint, on a file system that all ranks share; it must not exist.
        model: The model that ``opt`` was made with.
        opt: Its optimizer.
        extra: Whatever else is needed to go on: step, scheduler state, random states. Of group rank 0; ``None``, bools,
            numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, sets and dicts of these.
        keep: Then remove all complete checkpoints in the same parent directory but this many, the newest.

    Returns:
        ``path``.

    Raises:
        CheckpointError: It cannot be written (the disk is full or read-only, ``path`` exists, ...), on all ranks;
            nothing is left at ``path``. Or an earlier ``async_save`` failed.
        ConsistencyError: The ranks' arguments or models differ, or they did not all make this call.

    Example:
        >>> import freehold, tempfile, torch
        >>> model = torch.nn.Linear(8, 4)
        >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
        >>> with tempfile.TemporaryDirectory() as root:
        ...     path = freehold.save(f"{root}/step-10", model, opt, extra={"step": 10})
        ...     freehold.load(freehold.latest(root), model, opt)
        {'step': 10}
        >>> opt.close()
    """
    with during(opt, "save"):
        saving = _begin(path, model, opt, extra, keep, copies=False)
    saving.start(lingers=False)
    return saving.wait()


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    opt: LayerwiseOptimizer,
    *,
    extra: Any = None,
    keep: int | None = None,
) -> Saving:
    """Copy everything to CPU memory, return, and write the checkpoint meanwhile. Collective.

    Training goes on at once; it takes one more copy of this rank's part of the state in CPU memory. The next ``save``,
    ``async_save`` or ``load`` waits for it first, and raises what went wrong; so does ``wait()``.

    Args:
        path: As in ``save``.
        model: As in ``save``.
        opt: As in ``save``.
        extra: As in ``save``.
        keep: As in ``save``.

    Returns:
        The saving under way.

    Raises:
        CheckpointError: As in ``save``, as far as it is known by now.
        ConsistencyError: As in ``save``.

    Example:
        >>> import freehold, tempfile, torch
        >>> model = torch.nn.Linear(8, 4)
        >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
        >>> with tempfile.TemporaryDirectory() as root:
        ...     saving = freehold.async_save(f"{root}/step-10", model, opt)
        ...     saving.wait().name
        'step-10'
        >>> opt.close()
    """
    with during(opt, "async_save"):
        saving = _begin(path, model, opt, extra, keep, copies=True)
    saving.start(lingers=True)
    return saving


def during(opt: LayerwiseOptimizer, call: str) -> AbstractContextManager[None]:
    """Name the public call under way, for the errors of waits in it."""
    if not isinstance(opt, LayerwiseOptimizer):
        raise PlanTypeError(f"expected a freehold.LayerwiseOptimizer, got {type(opt).__name__}")
    return opt._comm.watch.during(call)


def settle_pending(opt: LayerwiseOptimizer) -> None:
    """Wait for the ``async_save`` that is still under way, if there is one. Collective."""
    saving = _pending.get(opt)
    if saving is not None:
        saving.wait()


def _begin(
    path: str | os.PathLike[str], model: nn.Module, opt: LayerwiseOptimizer, extra: Any, keep: Any, *, copies: bool
) -> Saving:
    """The first half: agree, plan, and take hold of the tensors."""
    meet(opt, "save")
    settle_pending(opt)
    comm, error, values = opt._comm, None, dict[str, str]()
    pieces: list[Piece] = []
    inventory, draft, target = Inventory(), None, Path()
    try:
        target = Path(os.path.abspath(path))
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(f"keep must be an int of at least 1, or None, got {keep!r}")
        if model is None:
            raise CheckpointError("expected the model as an nn.Module, got None")
        inventory = take_inventory(model, opt)
        objects, pieces = objects_of(inventory)
        values_of_rank_0: dict[str, Tensor] = {}
        draft = draft_of(opt, inventory, extra if comm.rank == 0 else None, values_of_rank_0)
        pieces += inventory.owned
        if comm.rank == 0:
            pieces += inventory.replicas
            pieces += [value_piece(key, tensor) for key, tensor in values_of_rank_0.items()]
        values = {"path": str(target), "keep": repr(keep), "names and shapes": digest(inventory.schemas)}
    except Exception as found:  # whatever it is, no rank may leave alone
        error, objects = found, {}
    agree(comm, error, values, doing="saving a checkpoint")
    assert draft is not None, "agree() raises where a rank failed"
    writer = PartWriter(target, copies=copies)
    planner = PieceSavePlanner(pieces, inventory.schemas, objects)
    try:
        drive_save(comm, planner, writer, doing=f"saving {target}")
    except Exception:
        if comm.rank == 0 and writer.folder is not None:
            discard(writer.folder)
        raise
    saving = Saving(opt, writer, draft, target, keep)
    _pending[opt] = saving
    return saving


class Saving:
    """A checkpoint being written; made by ``async_save``.

    Each rank's thread writes its part and leaves a note beside it. Group rank 0's thread completes the checkpoint as
    soon as it sees all notes; at the latest ``wait()`` does. No collective runs in a thread.
    """

    def __init__(
        self, opt: LayerwiseOptimizer, writer: PartWriter, draft: Draft, target: Path, keep: int | None
    ) -> None:
        assert writer.folder is not None, "the plan comes first"
        self._opt = weakref.ref(opt)
        self._comm = opt._comm
        self._writer = writer
        self._folder = writer.folder
        self._draft = draft
        self._target = target
        self._keep = keep
        self._record: FileRecord | None = None
        self._error: CheckpointError | None = None
        self._written = threading.Event()
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._complete = False
        self._settled = False

    def done(self) -> bool:
        """Whether this rank has nothing left to do; on group rank 0: whether the checkpoint is complete, or failed."""
        return self._ended.is_set()

    def wait(self) -> Path:
        """Return when the checkpoint is complete and on disk. Collective.

        Returns:
            Its path.

        Raises:
            CheckpointError: It could not be written, on all ranks; nothing is left at its path.
        """
        if not self._settled:
            with self._comm.watch.during("wait for a save"):
                self._settle()
        if self._error is not None:
            raise self._error
        return self._target

    def start(self, *, lingers: bool) -> None:
        """Write this rank's part, in a thread that outlives the main one if need be.

        Args:
            lingers: On group rank 0, stay until all parts are there or ``wait()`` is called, and complete it then.
        """
        threading.Thread(target=self._run, args=(lingers,), name="freehold-save").start()

    def _run(self, lingers: bool) -> None:
        try:
            with telling("writing a part of", self._target):
                self._record = self._writer.write_part()
                _leave_note(self._folder, self._comm.rank, self._record)
        except Exception as error:  # a thread has nobody to raise to; wait() does
            self._fail(error)
        self._written.set()
        try:
            if lingers and self._comm.rank == 0 and self._error is None:
                self._complete_when_all_are_there()
        except Exception as error:
            self._fail(error)
        self._ended.set()

    def _fail(self, error: Exception) -> None:
        known = isinstance(error, CheckpointError)
        self._error = error if known else CheckpointError(f"writing {self._target} failed: {error!r}")
        _log.error("%s", self._error)

    def _complete_when_all_are_there(self) -> None:
        records: list[FileRecord | None] = []
        patience = _EXIT_PATIENCE_S
        while not self._asked.wait(_POLL_S):
            while len(records) < self._comm.num_ranks:
                note = _read_note(self._folder, len(records))
                if note is None:
                    break
                records.append(note[0])
            else:
                self._publish(records)
                return
            patience -= 0.0 if threading.main_thread().is_alive() else _POLL_S
            if patience <= 0:
                raise CheckpointError(f"{self._target} stays incomplete: other ranks have not written their parts")

    def _publish(self, records: list[FileRecord | None]) -> None:
        with telling("completing", self._target):
            for rank in range(self._comm.num_ranks):
                _note_path(self._folder, rank).unlink(missing_ok=True)
            publish(self._folder, self._target, self._manifest(records))
        self._complete = True
        if self._keep is not None:
            try:
                prune(self._target.parent, self._keep)
            except OSError as error:  # the checkpoint itself is safe
                _log.warning("old checkpoints beside %s could not be removed: %s", self._target, error)

    def _manifest(self, records: list[FileRecord | None]) -> Manifest:
        draft = self._draft
        return Manifest(
            layout=draft.layout,
            created_ns=time.time_ns(),
            files=tuple(record for record in records if record is not None),
            tensors=self._writer.tensors,
            params=with_objects(draft.params, self._writer.planner_data),
            tied=draft.tied,
            groups=draft.groups,
            extra=draft.extra,
        )

    def _settle(self) -> None:
        wait_for_all(self._comm, self._written)
        reports = self._comm.gather_objects((self._error is not None, self._record))
        self._asked.set()
        wait_for_all(self._comm, self._ended)  # rank 0 may be completing the checkpoint, or pruning
        failed = any(refused for refused, _ in reports)
        records = [record for _, record in reports]
        try:
            on_all(self._comm, f"saving {self._target}", lambda: self._conclude(records, failed=failed))
        except CheckpointError as error:
            self._error = error
        self._settled = True
        opt = self._opt()
        if opt is not None:
            _pending.pop(opt, None)

    def _conclude(self, records: list[FileRecord | None], *, failed: bool) -> None:
        """Complete the checkpoint if that was not done yet, or remove what there is of it."""
        if self._comm.rank == 0 and not failed and not self._complete and self._error is None:
            try:
                self._publish(records)
            except Exception as error:
                self._fail(error)
        if self._comm.rank == 0 and not self._complete:
            discard(self._folder)
        if self._error is not None:
            raise self._error


def _note_path(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.done"


def _leave_note(folder: Path, rank: int, record: FileRecord | None) -> None:
    fields = None if record is None else [record.name, record.num_bytes, record.sha256]
    partial = _note_path(folder, rank).with_suffix(".partial")
    partial.write_text(json.dumps(fields))
    os.rename(partial, _note_path(folder, rank))


def _read_note(folder: Path, rank: int) -> tuple[FileRecord | None] | None:
    """What a rank wrote, in a tuple; ``None`` if it has not finished."""
    try:
        fields = json.loads(_note_path(folder, rank).read_text())
    except FileNotFoundError:
        return None
    return (None if fields is None else FileRecord(name=fields[0], num_bytes=fields[1], sha256=fields[2]),)
