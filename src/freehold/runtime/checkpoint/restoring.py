"""The last part of every kind of loading: state that was not saved, step counters, options, and weights for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from freehold.errors import CheckpointError
from freehold.runtime.checkpoint.inventory import Inventory, Schema
from freehold.runtime.checkpoint.manifest import ParamRecord
from freehold.runtime.checkpoint.values import decode

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["begin_restoring", "finish_restoring", "restore_objects", "restore_options"]


def begin_restoring(opt: LayerwiseOptimizer, source: Path) -> None:
    """Discard this window; until ``finish_restoring``, ``step`` refuses."""
    opt._reducer.end_window()
    opt.synchronize()
    opt._update_error = CheckpointError(f"loading {source} ended half-way")


def restore_objects(
    inventory: Inventory,
    params: Mapping[str, ParamRecord],
    name_of: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    opt: LayerwiseOptimizer,
) -> None:
    """Fill the dicts that rules keep per matrix, or empty them where nothing was saved."""
    for name, (first, kept) in inventory.objects.items():
        record = params[name_of[name]] if name in name_of else None
        device = opt._by_name[name].param.device
        for index, mine in enumerate(kept, start=first):
            saved = decode(record.objects[index], tensors) if record is not None and record.objects else {}
            mine.clear()
            mine.update({key: _on(value, device) for key, value in saved.items()})


def _on(value: Any, device: torch.device) -> Any:
    """A tensor of the rule's own: rules change theirs in place, and the caller's stays as it is."""
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def finish_restoring(
    opt: LayerwiseOptimizer,
    inventory: Inventory,
    missing: Sequence[Schema],
    steps: Mapping[str, int],
    options: Sequence[Mapping[str, Any]],
) -> None:
    """Fill in what was not saved, set step counters and options, and send the weights round. Collective.

    Args:
        opt: Whose shard has been filled.
        inventory: Its pieces.
        missing: What was not among them: masters are made from the weights, other state begins at zero.
        steps: Updates so far, by param; 0 where absent.
        options: For each param group.
    """
    zeroed = {schema.key for schema in missing if schema.field and schema.field != "master"}
    for piece in inventory.owned:
        if piece.key in zeroed:
            piece.tensor.zero_()
    rebuilt = {schema.name for schema in missing if schema.field == "master"}
    for bucket in opt._buckets:
        for part in bucket.parts:
            if part.param.name in rebuilt:
                bucket.memory.master[part.elements].copy_(bucket.memory.own_weights[part.elements])
    for p in opt._params:
        p.num_steps = steps.get(p.name, 0)
    restore_options(opt, options)
    for bucket in reversed(opt._buckets):
        opt._gatherer.launch(bucket)
    opt._gatherer.wait_all()
    opt._early.reset()
    opt._update_error = None


def restore_options(opt: LayerwiseOptimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Change the live param groups in place: schedulers hold on to these dicts."""
    for live, saved in zip(opt.param_groups, options, strict=True):
        live.update(saved)
