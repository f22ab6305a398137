"""Plain state dicts: the whole, never a part of it that could be mistaken for the whole."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from freehold.errors import CheckpointError
from freehold.runtime.agreement import agree
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.checkpoint.draft import options_of
from freehold.runtime.checkpoint.inventory import Inventory, optim_key, schemas_of, state_of, take_inventory
from freehold.runtime.checkpoint.manifest import GroupRecord, ParamRecord, TensorRecord
from freehold.runtime.checkpoint.matching import Match, Saved, match, match_groups
from freehold.runtime.checkpoint.meeting import meet
from freehold.runtime.checkpoint.restoring import begin_restoring, finish_restoring, restore_objects
from freehold.runtime.checkpoint.values import decode, encode
from freehold.runtime.consensus import options_text
from freehold.runtime.shard import shard_parts

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["full_optim_state_dict", "full_state_dict", "load_optim_state_dict"]

FORMAT = "freehold.optimizer"
VERSION = 1


def full_state_dict(model: nn.Module, opt: LayerwiseOptimizer | None = None) -> dict[str, Any]:
    """The model's state dict with memory of its own, on the CPU, to be saved by ``torch.save`` or safetensors.

    ``model.state_dict()`` itself is current too and loads anywhere, but its tensors are views: saving one of them
    writes the whole bucket that it lies in. Tied weights share their memory here as well. Not collective.

    Args:
        model: Wrapped by a ``LayerwiseOptimizer`` or not.
        opt: Its optimizer; needed only if that was made from named params, not from the model.

    Returns:
        Tensors by name, each of its own shape and dtype.

    Example:
        >>> import torch, freehold
        >>> model = torch.nn.Linear(8, 4)
        >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
        >>> freehold.full_state_dict(model, opt)["weight"].untyped_storage().nbytes()
        128
        >>> opt.close()
    """
    if opt is not None:
        opt.synchronize()
    copies: dict[int, Tensor] = {}
    result: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = value.detach().to("cpu", copy=True).contiguous()
            value = copies[id(value)]
        result[name] = value
    return result


@torch.no_grad()
def full_optim_state_dict(opt: LayerwiseOptimizer, *, rank0_only: bool = True) -> dict[str, Any] | None:
    """The optimizer's whole state, gathered from all owners, on the CPU. Collective.

    Besides the result itself it takes the memory of one bucket: buckets and fields are gathered one after the other.

    Args:
        opt: Of this rank.
        rank0_only: Give it to group rank 0 only, ``None`` to the others.

    Returns:
        ``state``: by qualified name ``step``, ``master`` if the weight is of low precision, and the rule's state, each
        in the shape of the param; ``param_groups``: options, and params by name. ``torch.load`` reads it with
        ``weights_only=True``.

    Raises:
        ConsistencyError: Not all ranks made this call.

    Example:
        >>> import torch, freehold
        >>> model = torch.nn.Linear(8, 4)
        >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
        >>> freehold.full_optim_state_dict(opt)["state"]["weight"]["momentum_buffer"].shape
        torch.Size([4, 8])
        >>> opt.close()
    """
    meet(opt, "state_dict")
    inventory = _agreed_inventory(opt, "state_dict")
    keeps = not rank0_only or opt._comm.rank == 0
    state: dict[str, dict[str, Any]] = {p.name: {"step": p.num_steps} for p in opt._params}
    for bucket in opt._buckets:
        _gather_bucket(bucket, opt, state if keeps else None)
    _gather_objects(inventory, opt, state)
    if not keeps:
        return None
    names = {id(p.param): p.name for p in opt._params}
    groups = [
        {**copy.deepcopy({**group, "params": ()}), "params": [names[id(param)] for param in group["params"]]}
        for group in opt.param_groups
    ]
    rules = {kind: rule.label for kind, rule in opt._options.rules.items()}
    return {"format": FORMAT, "version": VERSION, "rules": rules, "state": state, "param_groups": groups}


def _agreed_inventory(opt: LayerwiseOptimizer, doing: str) -> Inventory:
    """The optimizer's part of the inventory, if all ranks can take it."""
    inventory, error = Inventory(), None
    try:
        inventory = take_inventory(None, opt)
    except Exception as found:  # no rank may leave alone
        error = found
    agree(opt._comm, error, doing=doing)
    return inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """Elements of a gathered buffer that belong into a param's tensor."""

    name: str
    source: int
    target: int
    numel: int


def _gather_bucket(bucket: BucketBuffers, opt: LayerwiseOptimizer, state: dict[str, dict[str, Any]] | None) -> None:
    memory, num_ranks = bucket.memory, opt._comm.num_ranks
    fields = {item.name: item.per == "row" for p in bucket.params for item in state_of(opt, p)}
    if bucket.master_is_copy:
        fields = {"master": False, **fields}
    schemas = {s.key: s for p in bucket.params for s in schemas_of(p, bucket, state_of(opt, p))}
    for field, per_row in fields.items():
        own = memory.row_state[field] if per_row else {**memory.state, "master": memory.master}[field]
        moves, shard_numel = _moves(bucket, num_ranks, per_row=per_row)
        flat = own.new_zeros(num_ranks * shard_numel)
        opt._comm.own_shard(flat)[: own.numel()].copy_(own)
        opt._comm.all_gather(flat, bucket.index).wait()
        if state is None:
            continue
        for move in moves:
            schema = schemas.get(optim_key(move.name, field))
            if schema is not None:
                whole = state[move.name].setdefault(field, torch.empty(schema.shape, dtype=own.dtype))
                part = flat[move.source : move.source + move.numel]
                whole.view(-1)[move.target : move.target + move.numel].copy_(part)


def _moves(bucket: BucketBuffers, num_ranks: int, *, per_row: bool) -> tuple[list[_Move], int]:
    """What goes where once all shards are gathered, and the length of a shard, in elements or in rows."""
    shards = [shard_parts(bucket.bucket.slots_of_rank(rank), bucket.params) for rank in range(num_ranks)]
    parts = [part for shard in shards for part in shard if not per_row or part.num_matrices]
    places = [part.rows if per_row else part.elements for part in parts]
    length = max((place.stop for place in places), default=0)
    moves = [
        _Move(
            name=part.param.name,
            source=part.slot.rank * length + place.start,
            target=part.first_row if per_row else part.slot.start,
            numel=place.stop - place.start,
        )
        for part, place in zip(parts, places, strict=True)
    ]
    return moves, length


def _gather_objects(inventory: Inventory, opt: LayerwiseOptimizer, state: dict[str, dict[str, Any]]) -> None:
    """What rules keep per matrix, as a list of dicts under ``"objects"``; small, or the rule is at fault."""
    if not any(opt._options.rules[group["rule"]].keeps_objects for group in opt.param_groups):
        return
    sent = {name: (first, [_copied(item) for item in kept]) for name, (first, kept) in inventory.objects.items()}
    found: dict[str, dict[int, Any]] = {}
    for of_rank in opt._comm.gather_objects(sent):
        for name, (first, kept) in of_rank.items():
            found.setdefault(name, {}).update(enumerate(kept, start=first))
    for name, by_index in found.items():
        state[name]["objects"] = [item for _, item in sorted(by_index.items())]


def _copied(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    record = encode(value, tensors, "objects")
    return decode(record, {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()})


@torch.no_grad()
def load_optim_state_dict(opt: LayerwiseOptimizer, state_dict: Any) -> None:
    """Take this rank's part of a gathered state. Collective: every rank passes the whole.

    Args:
        opt: Of this rank.
        state_dict: What ``full_optim_state_dict`` or ``opt.state_dict()`` returned, at any number of ranks.

    Raises:
        CheckpointError: It is something else, or does not fit; nothing was loaded.
        ConsistencyError: Not all ranks made this call, or what they pass differs in names, shapes, step counters or
            options; nothing was loaded.
    """
    meet(opt, "load_state_dict")
    inventory, error, values = _agreed_inventory(opt, "load_state_dict"), None, dict[str, str]()
    options: list[Mapping[str, Any]] = []
    records: dict[str, ParamRecord] = {}
    tensors: dict[str, Tensor] = {}
    try:
        saved = _saved(state_dict)
        result = match(saved, inventory, opt)
        options = _options_of(state_dict, opt)
        result.refuse("the state dict", strict=True)
        for name, record in saved.params.items():
            records[name] = _with_tensors(record, state_dict["state"][name], tensors)
        values = _to_compare(saved, state_dict["param_groups"])
    except Exception as found:  # no rank may leave alone
        error = found
    agree(opt._comm, error, values, doing="load_state_dict")
    begin_restoring(opt, Path("a state dict"))
    for piece in inventory.owned:
        tensor = state_dict["state"][piece.schema.name][piece.schema.field]
        for dim, (offset, size) in enumerate(zip(piece.offsets, piece.tensor.shape, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        piece.tensor.copy_(tensor)
    restore_objects(inventory, records, {p.name: p.name for p in opt._params}, tensors, opt)
    steps = {name: record.num_steps for name, record in records.items()}
    finish_restoring(opt, inventory, (), steps, options)


def _to_compare(saved: Saved, groups: Any) -> dict[str, str]:
    """What must be equal on all ranks, or training goes apart without a word. State itself is each owner's alone."""
    steps = sorted((name, record.num_steps) for name, record in saved.params.items())
    counts = sorted({num_steps for _, num_steps in steps})
    return {
        "names and shapes": _short_hash((sorted(saved.tensors.items()), [group["params"] for group in groups])),
        "step counters": f"{', '.join(map(str, counts[:5]))} (hash {_short_hash(steps)})",
        "options": options_text(groups),
    }


def _short_hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _saved(state_dict: Any) -> Saved:
    if not isinstance(state_dict, Mapping) or state_dict.get("format") != FORMAT:
        raise CheckpointError(
            "expected what LayerwiseOptimizer.state_dict() returned, on every rank; got "
            + (f"a dict with {sorted(map(str, state_dict))[:5]}" if isinstance(state_dict, Mapping) else "no dict")
            + ". State of torch.optim optimizers is matched by position, not by name, and cannot be used"
        )
    if state_dict["version"] != VERSION:
        raise CheckpointError(f"expected a state dict of version {VERSION}, got {state_dict['version']!r}")
    kinds = {name: group["rule"] for group in state_dict["param_groups"] for name in group["params"]}
    tensors: dict[str, TensorRecord] = {}
    params: dict[str, ParamRecord] = {}
    for name, fields in state_dict["state"].items():
        for field, value in fields.items():
            if isinstance(value, Tensor):
                tensors[optim_key(name, field)] = TensorRecord(dtype=value.dtype, shape=tuple(value.shape))
        params[name] = ParamRecord(
            rule=kinds[name],
            rule_class=state_dict["rules"][kinds[name]],
            num_steps=fields["step"],
            objects=tuple(fields.get("objects", ())),
        )
    return Saved(tensors=tensors, params=params, tied={})


def _with_tensors(record: ParamRecord, fields: Mapping[str, Any], tensors: dict[str, Tensor]) -> ParamRecord:
    kept = tuple(encode(item, tensors, "objects") for item in fields.get("objects", ()))
    return replace(record, objects=kept)


def _options_of(state_dict: Mapping[str, Any], opt: LayerwiseOptimizer) -> list[Mapping[str, Any]]:
    groups = tuple(
        GroupRecord(
            pattern=group["pattern"],
            rule=group["rule"],
            params=tuple(group["params"]),
            options=options_of(group),
        )
        for group in state_dict["param_groups"]
    )
    result = Match()
    found = match_groups(groups, opt, {p.name: p.name for p in opt._params}, result)
    result.refuse("the state dict", strict=True)
    for options, live in zip(found, opt.param_groups, strict=True):
        if options is not None:
            opt._options.rules[live["rule"]].validate({**live, **options})
    return [{} if options is None else copy.deepcopy(dict(options)) for options in found]
