"""``load``: check everything, then fill live memory, then bring every rank's weights up to date."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freehold.errors import CheckpointError
from freehold.runtime.agreement import agree
from freehold.runtime.checkpoint.draft import value_piece
from freehold.runtime.checkpoint.driver import drive_load
from freehold.runtime.checkpoint.inventory import Inventory, Piece, take_inventory
from freehold.runtime.checkpoint.manifest import Manifest, read_manifest
from freehold.runtime.checkpoint.matching import Match, Saved, decoded_options, match, match_groups
from freehold.runtime.checkpoint.meeting import meet
from freehold.runtime.checkpoint.patience import on_all
from freehold.runtime.checkpoint.planner import PieceLoadPlanner
from freehold.runtime.checkpoint.restoring import begin_restoring, finish_restoring, restore_objects
from freehold.runtime.checkpoint.saving import during, settle_pending
from freehold.runtime.checkpoint.storage import CheckpointReader, finish_streams
from freehold.runtime.checkpoint.tensor_file import hash_file
from freehold.runtime.checkpoint.values import decode
from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one rank reads, decided before anything is written."""

    manifest: Manifest
    inventory: Inventory
    match: Match
    options: list[Any]
    values: dict[str, Tensor]

    def pieces(self) -> list[tuple[str, Piece]]:
        """Every piece that was saved, with the key under which it was."""
        wanted = [*self.inventory.owned, *self.inventory.replicas]
        found = [(self.match.key_of[piece.key], piece) for piece in wanted if piece.key in self.match.key_of]
        return found + [(key, value_piece(key, tensor)) for key, tensor in self.values.items()]


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    opt: LayerwiseOptimizer,
    *,
    strict: bool = True,
    restore_options: bool = True,
) -> Any:
    """Load a checkpoint, whatever the number of ranks, bucket size and policy that it was saved with. Collective.

    First every name, shape and dtype is compared and every byte of the files checked against its checksum; then
    weights, buffers, masters, state and step counters are filled in, bit for bit, and gradients discarded. On return
    every rank holds the saved weights.

    Args:
        path: The checkpoint, for example ``freehold.latest(directory)``.
        model: The model that ``opt`` was made with.
        opt: Its optimizer.
        strict: If false, pass over what is missing (state begins at zero, masters are made from the weights) and what
            has no place here, with a warning. Wrong shapes and dtypes are errors always.
        restore_options: Take over the saved options of the param groups (learning rates as a scheduler left them) by
            the names of their params.

    Returns:
        What ``save`` was given as ``extra``, on every rank.

    Raises:
        CheckpointError: It is missing, damaged or incomplete, or does not fit; on all ranks. Unless the text says
            otherwise, nothing was loaded.
        ConsistencyError: The ranks' arguments differ, or they did not all make this call.

    Example:
        >>> import freehold, tempfile, torch
        >>> model = torch.nn.Linear(8, 4)
        >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
        >>> with tempfile.TemporaryDirectory() as root:
        ...     path = freehold.save(f"{root}/step-10", model, opt, extra=["any", 1, torch.ones(2)])
        ...     freehold.load(path, model, opt)
        ['any', 1, tensor([1., 1.])]
        >>> opt.close()
    """
    with during(opt, "load"):
        meet(opt, "load")
        settle_pending(opt)
        folder, plan = _agreed_plan(path, model, opt, strict=strict, restore_options=restore_options)
        on_all(opt._comm, "checking the files of a checkpoint", lambda: _check_files(folder, plan.manifest, opt))
        return _fill(folder, plan, opt, strict=strict)


def _agreed_plan(
    path: object, model: nn.Module, opt: LayerwiseOptimizer, *, strict: bool, restore_options: bool
) -> tuple[Path, _Plan]:
    folder, plan, error, texts = Path(), None, None, dict[str, str]()
    try:
        folder = _folder(path)
        plan = _plan(folder, model, opt, strict=strict, restore_options=restore_options)
        texts = {
            "path": str(folder),
            "strict and restore_options": f"{strict}, {restore_options}",
            "time of saving": str(plan.manifest.created_ns),
        }
    except Exception as found:  # whatever it is, no rank may leave alone
        error = found
    agree(opt._comm, error, texts, doing="loading a checkpoint")
    assert plan is not None, "agree() raises where a rank failed"
    return folder, plan


def _folder(path: object) -> Path:
    if path is None:
        raise CheckpointError("there is no checkpoint: path is None, which is what latest() says of an empty directory")
    return Path(os.path.abspath(path))  # pyright: ignore[reportArgumentType, reportCallIssue]  a TypeError is fine


def _plan(folder: Path, model: nn.Module, opt: LayerwiseOptimizer, *, strict: bool, restore_options: bool) -> _Plan:
    manifest = read_manifest(folder)
    if model is None:
        raise CheckpointError("expected the model as an nn.Module, got None")
    inventory = take_inventory(model, opt)
    saved = Saved(tensors=manifest.tensors, params=manifest.params, tied=manifest.tied)
    result = match(saved, inventory, opt)
    options: list[Any] = [None] * len(opt.param_groups)
    if restore_options:
        options = match_groups(manifest.groups, opt, result.name_of, result)
    result.refuse(f"the checkpoint {folder}", strict=strict)
    objects = [
        manifest.params[result.name_of[name]].objects[first + i]
        for name, (first, kept) in inventory.objects.items()
        if name in result.name_of and manifest.params[result.name_of[name]].objects
        for i in range(len(kept))
    ]
    return _Plan(
        manifest=manifest,
        inventory=inventory,
        match=result,
        options=options,
        values=_values([manifest.extra, options, objects], manifest),
    )


def _values(records: Any, manifest: Manifest) -> dict[str, Tensor]:
    """Empty CPU tensors for all that encoded values refer to."""
    values: dict[str, Tensor] = {}
    for key in _references(records):
        if key not in manifest.tensors:
            raise CheckpointError(f"the checkpoint refers to a tensor {key!r} that it does not hold")
        record = manifest.tensors[key]
        values[key] = torch.empty(record.shape, dtype=record.dtype)
    return values


def _references(record: Any) -> Iterable[str]:
    if isinstance(record, (list, tuple)):
        for item in record:
            yield from _references(item)
    elif isinstance(record, dict):
        for key, item in record.items():
            if key in ("$tensor", "$ndarray") and isinstance(item, str):
                yield item
            else:
                yield from _references(item)


def _check_files(folder: Path, manifest: Manifest, opt: LayerwiseOptimizer) -> None:
    """Read this rank's share of the files once, and compare checksums."""
    comm = opt._comm
    problems = [hash_file(folder, record) for record in manifest.files[comm.rank :: comm.num_ranks]]
    found = [problem for problem in problems if problem]
    if found:
        raise CheckpointError("; ".join(found) + "; nothing was loaded. Use an older checkpoint")


@torch.no_grad()
def _fill(folder: Path, plan: _Plan, opt: LayerwiseOptimizer, *, strict: bool) -> Any:
    if not strict and plan.match.lenient:
        warnings.warn(
            f"loaded {folder} with strict=False, passing over: " + "; ".join(plan.match.lenient[:10]), stacklevel=3
        )
    begin_restoring(opt, folder)
    doing = f"reading {folder} (the weights are now partly loaded: load a checkpoint again)"
    drive_load(opt._comm, PieceLoadPlanner(plan.pieces()), CheckpointReader(folder), doing=doing)
    finish_streams(bucket.memory.weights for bucket in opt._buckets)
    extra, options, error = None, list[Mapping[str, Any]](), None
    try:
        extra = decode(plan.manifest.extra, plan.values)
        options = [
            decoded_options(record, live, plan.values, opt)
            for record, live in zip(plan.options, opt.param_groups, strict=True)
        ]
        restore_objects(plan.inventory, plan.manifest.params, plan.match.name_of, plan.values, opt)
    except Exception as found:
        error = found
    agree(opt._comm, error, doing=doing)
    steps = {name: plan.manifest.params[saved].num_steps for name, saved in plan.match.name_of.items()}
    finish_restoring(opt, plan.inventory, plan.match.missing, steps, options)
    return extra
