"""JSON form of a layout's parts, and a reader that says exactly what it misses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import cast

from freehold.errors import LayoutError, PlanError, PlanTypeError
from freehold.plan.bucket import Bucket, Slot
from freehold.plan.spec import ParamSpec

__all__ = ["Record", "bucket_record", "param_record", "parse_json", "read_bucket", "read_param"]

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A JSON object that is read strictly: every key must be there and have its type, none may be left over.

    Attributes:
        where: What the object is, for messages.
        values: The object.
    """

    where: str
    values: JsonObject
    _read: set[str] = field(default_factory=set[str], init=False, repr=False, compare=False)

    def value(self, key: str) -> object:
        """The value of ``key``, of any type."""
        self._read.add(key)
        if key not in self.values:
            raise LayoutError(f"{self.where} has no {key!r}")
        return self.values[key]

    def integer(self, key: str) -> int:
        """An int that is no bool."""
        value = self.value(key)
        if type(value) is not int:
            raise self._mismatch(key, "an integer", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        """An int or null."""
        return None if self.value(key) is None else self.integer(key)

    def boolean(self, key: str) -> bool:
        """A bool."""
        value = self.value(key)
        if type(value) is not bool:
            raise self._mismatch(key, "true or false", value)
        return value

    def string(self, key: str) -> str:
        """A string."""
        value = self.value(key)
        if type(value) is not str:
            raise self._mismatch(key, "a string", value)
        return value

    def optional_string(self, key: str) -> str | None:
        """A string or null."""
        return None if self.value(key) is None else self.string(key)

    def items(self, key: str) -> list[object]:
        """A list."""
        value = self.value(key)
        if type(value) is not list:
            raise self._mismatch(key, "a list", value)
        return cast("list[object]", value)

    def records(self, key: str) -> list[Record]:
        """A list of objects."""
        records: list[Record] = []
        for index, value in enumerate(self.items(key)):
            if type(value) is not dict:
                raise self._mismatch(f"{key}[{index}]", "an object", value)
            records.append(Record(where=f"{self.where}.{key}[{index}]", values=cast("JsonObject", value)))
        return records

    def finish(self) -> None:
        """Refuse keys that nobody asked for: they would be lost in silence."""
        unknown = sorted(self.values.keys() - self._read)
        if unknown:
            raise LayoutError(f"{self.where} has unknown keys {unknown}")

    def _mismatch(self, key: str, expected: str, value: object) -> LayoutError:
        return LayoutError(f"{self.where}.{key}: expected {expected}, got {value!r:.80}")


def parse_json(text: str) -> JsonObject:
    """The JSON object that ``text`` holds, or a ``LayoutError``."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError) as error:
        raise LayoutError(f"a layout must be JSON text: {error}") from error
    if type(value) is not dict:
        raise LayoutError(f"a layout must be a JSON object, got {value!r:.80}")
    return cast("JsonObject", value)


def param_record(spec: ParamSpec) -> JsonObject:
    """A param as a JSON object."""
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "rule": spec.rule,
        "granule_numel": spec.granule_numel,
        "isolated": spec.isolated,
        "tied_to": spec.tied_to,
    }


def read_param(record: Record) -> ParamSpec:
    """The param that ``param_record`` wrote."""
    rule = record.string("rule")
    if rule not in ("matrix", "elementwise"):
        raise LayoutError(f"{record.where}.rule: expected 'matrix' or 'elementwise', got {rule!r}")
    shape = cast("tuple[int, ...]", tuple(record.items("shape")))
    try:
        spec = ParamSpec(
            name=record.string("name"),
            shape=shape,
            dtype=record.string("dtype"),
            rule=rule,
            granule_numel=record.optional_integer("granule_numel"),
            isolated=record.boolean("isolated"),
            tied_to=record.optional_string("tied_to"),
        )
    except (PlanError, PlanTypeError) as error:
        raise LayoutError(f"{record.where}: {error}") from error
    record.finish()
    return spec


def bucket_record(bucket: Bucket) -> JsonObject:
    """A bucket as a JSON object; the number of ranks is the layout's."""
    return {
        "index": bucket.index,
        "mode": bucket.mode,
        "dtype": bucket.dtype,
        "start": bucket.start,
        "shard_numel": bucket.shard_numel,
        "slots": [
            {
                "name": slot.name,
                "rank": slot.rank,
                "offset": slot.offset,
                "start": slot.start,
                "stop": slot.stop,
            }
            for slot in bucket.slots
        ],
    }


def read_bucket(record: Record, num_ranks: int) -> Bucket:
    """The bucket that ``bucket_record`` wrote."""
    mode = record.string("mode")
    if mode not in ("whole", "flat"):
        raise LayoutError(f"{record.where}.mode: expected 'whole' or 'flat', got {mode!r}")
    bucket = Bucket(
        index=record.integer("index"),
        mode=mode,
        dtype=record.string("dtype"),
        num_ranks=num_ranks,
        start=record.integer("start"),
        shard_numel=record.integer("shard_numel"),
        slots=tuple(_read_slot(item) for item in record.records("slots")),
    )
    record.finish()
    return bucket


def _read_slot(record: Record) -> Slot:
    slot = Slot(
        name=record.string("name"),
        rank=record.integer("rank"),
        offset=record.integer("offset"),
        start=record.integer("start"),
        stop=record.integer("stop"),
    )
    record.finish()
    return slot
