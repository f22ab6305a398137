"""What the manifest of a checkpoint will say besides tensors and files, and the tensors among plain values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from freehold.runtime.checkpoint.inventory import Inventory, Piece, Schema
from freehold.runtime.checkpoint.manifest import GroupRecord, ParamRecord
from freehold.runtime.checkpoint.values import encode

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["Draft", "digest", "draft_of", "objects_of", "options_of", "value_piece", "with_objects"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What the manifest will say besides tensors and files; complete on group rank 0."""

    layout: dict[str, Any]
    params: dict[str, ParamRecord]
    tied: dict[str, str]
    groups: tuple[GroupRecord, ...]
    extra: Any


def draft_of(opt: LayerwiseOptimizer, inventory: Inventory, extra: Any, tensors: dict[str, Tensor]) -> Draft:
    """Write down params, groups and ``extra``; tensors among their values go into ``tensors``."""
    names = {id(p.param): p.name for p in opt._params}
    params: dict[str, ParamRecord] = {}
    for p in opt._params:
        kind = opt.param_groups[p.group]["rule"]
        params[p.name] = ParamRecord(rule=kind, rule_class=opt._options.rules[kind].label, num_steps=p.num_steps)
    groups = tuple(
        GroupRecord(
            pattern=group["pattern"],
            rule=group["rule"],
            params=tuple(names[id(param)] for param in group["params"]),
            options=encode(options_of(group), tensors, "options"),
        )
        for group in opt.param_groups
    )
    layout = opt.layout
    return Draft(
        layout={
            "fingerprint": layout.fingerprint(),
            "num_ranks": layout.num_ranks,
            "policy": layout.policy,
            "bucket_numel": layout.bucket_numel,
        },
        params=params,
        tied=inventory.tied,
        groups=groups,
        extra=encode(extra, tensors, "extra"),
    )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a param group is options: all but what says which params it holds."""
    return {key: value for key, value in group.items() if key not in ("params", "pattern", "rule")}


def objects_of(inventory: Inventory) -> tuple[dict[str, tuple[int, list[Any]]], list[Piece]]:
    """What rules keep per matrix: encoded, by param and index of the first matrix, and its tensors."""
    records: dict[str, tuple[int, list[Any]]] = {}
    pieces: list[Piece] = []
    for name, (first, kept) in inventory.objects.items():
        tensors: dict[str, Tensor] = {}
        encoded = [encode(item, tensors, f"objects.{name}.{first + i}") for i, item in enumerate(kept)]
        records[name] = (first, encoded)
        pieces += [value_piece(key, tensor) for key, tensor in tensors.items()]
    return records, pieces


def value_piece(key: str, tensor: Tensor) -> Piece:
    """A tensor out of ``extra``, options or objects; its key stands by itself."""
    return Piece(
        schema=Schema(name=key, field="", dtype=tensor.dtype, shape=tuple(tensor.shape), bare=True),
        offsets=(0,) * tensor.ndim,
        tensor=tensor,
    )


def digest(schemas: dict[str, Schema]) -> str:
    """A text that is equal for equal names, shapes and dtypes."""
    return hashlib.sha256(repr(sorted(schemas.items())).encode()).hexdigest()[:16]


def with_objects(params: dict[str, ParamRecord], of_ranks: list[Any]) -> dict[str, ParamRecord]:
    """The params with what all ranks' rules keep per matrix, as ``objects_of`` returned it on each."""
    found: dict[str, dict[int, Any]] = {}
    for records in of_ranks:
        for name, (first, kept) in records.items():
            found.setdefault(name, {}).update(enumerate(kept, start=first))
    return {
        name: replace(p, objects=tuple(item for _, item in sorted(found.get(name, {}).items())))
        for name, p in params.items()
    }
