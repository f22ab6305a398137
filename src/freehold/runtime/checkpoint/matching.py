"""What a checkpoint holds against what a model and its optimizer want: every mismatch, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from freehold.errors import CheckpointError, RuleError
from freehold.runtime.checkpoint.inventory import Inventory, Schema, model_key, optim_key
from freehold.runtime.checkpoint.manifest import GroupRecord, ParamRecord, TensorRecord
from freehold.runtime.checkpoint.values import decode

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["Match", "Saved", "decoded_options", "match", "match_groups"]

_SHOWN = 50  # of each kind, in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The part of a manifest, or of a gathered state dict, that is matched by name."""

    tensors: Mapping[str, TensorRecord]
    params: Mapping[str, ParamRecord]
    tied: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class Match:
    """What goes where, and what does not fit.

    Attributes:
        key_of: Saved key of each wanted key that was found.
        name_of: Saved name of each managed param that was found.
        missing: Wanted keys that were not saved.
        lenient: Mismatches that ``strict=False`` passes over.
        fatal: Mismatches that nothing passes over.
    """

    key_of: dict[str, str] = field(default_factory=dict)
    name_of: dict[str, str] = field(default_factory=dict)
    missing: list[Schema] = field(default_factory=list)
    lenient: list[str] = field(default_factory=list)
    fatal: list[str] = field(default_factory=list)

    def refuse(self, what: str, *, strict: bool) -> None:
        """Raise one error that lists every mismatch, if there is any that counts.

        Raises:
            CheckpointError: Nothing was loaded.
        """
        found = [*self.fatal, *(self.lenient if strict else [])]
        if not found:
            return
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        advice = "\nPass strict=False to load what fits, and to begin with zero state where none was saved" * (
            strict and not self.fatal
        )
        lines = "".join(f"\n  {problem}" for problem in found[:_SHOWN])
        raise CheckpointError(f"{what} does not fit; nothing was loaded:{lines}{more}{advice}")


def match(saved: Saved, inventory: Inventory, opt: LayerwiseOptimizer) -> Match:
    """Compare by name. Local, and the same on all ranks.

    Args:
        saved: What there is.
        inventory: What is wanted.
        opt: Whose rules and matrices are compared.
    """
    result = Match()
    for schema in inventory.schemas.values():
        key = _saved_key(saved, schema)
        if key is None:
            result.missing.append(schema)
            result.lenient.append(f"{_what(schema)} is missing from the checkpoint")
            continue
        result.key_of[schema.key] = key
        found = saved.tensors[key]
        if found.shape != schema.shape:
            result.fatal.append(f"{_what(schema)}: expected shape {schema.shape}, the checkpoint has {found.shape}")
        if found.dtype != schema.dtype:
            result.fatal.append(f"{_what(schema)}: expected {schema.dtype}, the checkpoint has {found.dtype}")
    used = set(result.key_of.values())
    result.lenient += [
        f"{key!r} is in the checkpoint, but has no place here"
        for key in saved.tensors
        if key not in used and key.startswith(("model.", "optim.") if _has_model(inventory) else "optim.")
    ]
    _match_ties(saved, inventory, result)
    _match_params(saved, opt, result)
    return result


def _has_model(inventory: Inventory) -> bool:
    return any(not schema.field for schema in inventory.schemas.values())


def _saved_key(saved: Saved, schema: Schema) -> str | None:
    """Tied tensors may have been saved under another of their names."""
    for name in (schema.name, saved.tied.get(schema.name)):
        if name is not None:
            key = optim_key(name, schema.field) if schema.field else model_key(name)
            if key in saved.tensors:
                return key
    return None


def _what(schema: Schema) -> str:
    return f"{schema.field!r} of param {schema.name!r}" if schema.field else f"{schema.name!r}"


def _match_ties(saved: Saved, inventory: Inventory, result: Match) -> None:
    for alias, name in inventory.tied.items():
        if model_key(alias) in saved.tensors and model_key(name) in saved.tensors:
            result.fatal.append(f"{alias!r} and {name!r} are one tensor here, but two in the checkpoint")
    names = {schema.name for schema in inventory.schemas.values() if not schema.field}
    for alias, name in saved.tied.items():
        if alias in names and name in names:
            result.fatal.append(f"{alias!r} and {name!r} are one tensor in the checkpoint, but two here")


def _match_params(saved: Saved, opt: LayerwiseOptimizer, result: Match) -> None:
    for p in opt._params:
        name = p.name if p.name in saved.params else saved.tied.get(p.name, "")
        record = saved.params.get(name)
        if record is None:
            result.lenient.append(f"param {p.name!r} was not trained when the checkpoint was saved: it has no state")
            continue
        result.name_of[p.name] = name
        kind = opt.param_groups[p.group]["rule"]
        rule = opt._options.rules[kind].label
        if (record.rule, record.rule_class) != (kind, rule):
            result.lenient.append(f"param {p.name!r} was updated by {record.rule_class}, and now is by {rule}")
        if p.matrix_shape is not None and record.objects:
            num_matrices = p.param.numel() // math.prod(p.matrix_shape)
            if len(record.objects) != num_matrices:
                result.fatal.append(f"param {p.name!r}: state of {num_matrices} matrices, got {len(record.objects)}")


def match_groups(
    groups: Sequence[GroupRecord], opt: LayerwiseOptimizer, name_of: Mapping[str, str], result: Match
) -> list[Any]:
    """For every live param group the saved options of its params, still encoded; ``None`` where there are none.

    Options are matched by the names of the params, those of empty groups by pattern and rule.
    """
    saved_of = {name: group for group in groups for name in group.params}
    found: list[Any] = []
    by_id = {id(p.param): p.name for p in opt._params}
    for index, live in enumerate(opt.param_groups):
        names = [by_id[id(param)] for param in live["params"]]
        records = [saved_of[name_of[name]] for name in names if name in name_of and name_of[name] in saved_of]
        if not names:
            records = [g for g in groups if (g.pattern, g.rule) == (live["pattern"], live["rule"])][:1]
        texts = {repr(sorted(_comparable(record.options).items())) for record in records}
        if len(texts) > 1:
            result.fatal.append(
                f"param group {index} ({live['pattern']!r}) holds params that had different options when they were "
                "saved; make the same groups as then, or pass restore_options=False to keep the options as they are"
            )
        found.append(records[0].options if records else None)
    return found


def _comparable(options: Any) -> Any:
    """Tensors of two groups are stored apart, even where they are equal."""
    return {
        key: "a tensor" if isinstance(value, Tensor) or "$tensor" in repr(value) else value
        for key, value in options.items()
    }


def decoded_options(record: Any, live: Mapping[str, Any], tensors: Mapping[str, Any], opt: LayerwiseOptimizer) -> Any:
    """The saved options of one group, checked by its rule; those that the rule does not know are a scheduler's.

    Raises:
        CheckpointError: The rule cannot work with them.
    """
    if record is None:
        return {}
    options = decode(record, tensors)
    rule = opt._options.rules[live["rule"]]
    try:
        rule.validate({**live, **options})
    except RuleError as error:
        raise CheckpointError(f"the saved options of group {live['pattern']!r} cannot be used: {error}") from error
    return options
