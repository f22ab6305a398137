"""The plan as data: which rank holds which piece of which param, in which bucket, at which offset."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from freehold.errors import LayoutError
from freehold.plan.bucket import Bucket, Mode, Slot
from freehold.plan.invariants import find_problems
from freehold.plan.problem import align_up
from freehold.plan.serial import Record, bucket_record, param_record, parse_json, read_bucket, read_param
from freehold.plan.spec import ParamSpec

__all__ = ["Bucket", "Layout", "Mode", "Padding", "Slot"]

_FORMAT = "freehold.layout"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Buffer elements that hold no param, by cause.

    Attributes:
        alignment: Lost by rounding starts of slots and ends of shards up to their units. In a flat bucket
            that is all.
        imbalance: Lost because the shards of a whole bucket are filled to different heights.
    """

    alignment: int
    imbalance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    bucket: Bucket
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where every element of every param lives. Equal inputs give equal layouts on every rank and every run.

    Made by ``freehold.plan``; changed only through ``dataclasses.replace``.

    Attributes:
        num_ranks: Ranks of the data-parallel group.
        alignment: Slots begin on multiples of this many elements.
        high_busbw: Buckets are multiples of 2**16 elements as well.
        bucket_numel: Soft minimum of a bucket's real elements (the number, after ``"default"`` was resolved),
            or ``None`` for one bucket of each mode and dtype.
        policy: Name of the policy that made it.
        params: The params in model order; tied ones are listed but have no slots.
        buckets: In the order in which they become ready in backward.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> params = [ParamSpec(name="a", shape=(16, 8)), ParamSpec(name="b", shape=(8, 8))]
        >>> layout = plan(params, num_ranks=2)
        >>> layout.owner("a"), layout.owner("b"), layout.numel, layout.padding_numel
        (0, 1, 256, 64)
        >>> layout.problems()
        []
        >>> Layout.from_json(layout.to_json()) == layout
        True
    """

    num_ranks: int
    alignment: int
    high_busbw: bool
    bucket_numel: int | None
    policy: str
    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    # Built at the first lookup, because a layout may hold 45,000 params. It is derived, so it takes no part
    # in equality.
    _places: dict[str, _Place] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def real_numel(self) -> int:
        """Elements that belong to params; tied params count once."""
        return sum(spec.numel for spec in self.params if spec.tied_to is None)

    @property
    def padding_numel(self) -> int:
        """Elements of all buffers that belong to no param."""
        return self.numel - self.real_numel

    @property
    def padding_by_cause(self) -> Padding:
        """``padding_numel``, split by what caused it."""
        alignment = sum(_alignment_padding(bucket, self.alignment) for bucket in self.buckets)
        return Padding(alignment=alignment, imbalance=self.padding_numel - alignment)

    def owner(self, name: str) -> int:
        """The rank that holds the whole param.

        Args:
            name: Qualified name; a tied param is looked up under what it is tied to.

        Raises:
            LayoutError: Its elements lie on several ranks, or there is no such param.
        """
        slots = self.slots_of(name)
        if slots[0].rank != slots[-1].rank:
            ranks = sorted({slot.rank for slot in slots})
            raise LayoutError(
                f"param {name!r} has no single owner: its elements lie on {len(ranks)} ranks, "
                f"{_some(ranks)}; use slots_of(name)"
            )
        return slots[0].rank

    def bucket_of(self, name: str) -> Bucket:
        """The bucket that holds a param."""
        return self._place(name).bucket

    def slots_of(self, name: str) -> tuple[Slot, ...]:
        """The pieces of a param, in the order of its elements."""
        return self._place(name).slots

    def problems(self) -> list[str]:
        """Every violation of the invariants that the runtime relies on; empty for a sound layout.

        The invariants: every element of every param is in exactly one slot, on an aligned offset; shard edges
        of whole buckets fall between granules; a param is one contiguous range of its bucket; buckets have
        their legal sizes, stand in the order in which they become ready, and hold at least ``bucket_numel``
        elements where they must.
        """
        return find_problems(self)

    def to_json(self) -> str:
        """The layout as canonical JSON: equal layouts give equal text, on every machine."""
        record = {
            "format": _FORMAT,
            "version": _VERSION,
            "num_ranks": self.num_ranks,
            "alignment": self.alignment,
            "high_busbw": self.high_busbw,
            "bucket_numel": self.bucket_numel,
            "policy": self.policy,
            "params": [param_record(spec) for spec in self.params],
            "buckets": [bucket_record(bucket) for bucket in self.buckets],
        }
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that ``to_json`` wrote.

        Raises:
            LayoutError: The text is no layout, or one that breaks an invariant.
        """
        record = Record(where="layout", values=parse_json(text))
        found = (record.string("format"), record.integer("version"))
        if found != (_FORMAT, _VERSION):
            raise LayoutError(f"expected a {_FORMAT!r} of version {_VERSION}, got {found[0]!r} of version {found[1]}")
        num_ranks = record.integer("num_ranks")
        layout = cls(
            num_ranks=num_ranks,
            alignment=record.integer("alignment"),
            high_busbw=record.boolean("high_busbw"),
            bucket_numel=record.optional_integer("bucket_numel"),
            policy=record.string("policy"),
            params=tuple(read_param(item) for item in record.records("params")),
            buckets=tuple(read_bucket(item, num_ranks) for item in record.records("buckets")),
        )
        record.finish()
        problems = layout.problems()
        if problems:
            raise LayoutError("the layout is inconsistent:\n  " + "\n  ".join(problems))
        return layout

    def fingerprint(self) -> str:
        """SHA-256 of ``to_json()``, in hex: what ranks compare before they move any data."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def _place(self, name: str) -> _Place:
        if self._places is None:
            object.__setattr__(self, "_places", _places(self))
        assert self._places is not None
        place = self._places.get(name)
        if place is None:
            raise LayoutError(f"no param {name!r} in this layout of {len(self.params)} params")
        return place


def _places(layout: Layout) -> dict[str, _Place]:
    slots: dict[str, list[Slot]] = {}
    buckets: dict[str, Bucket] = {}
    for bucket in layout.buckets:
        for slot in bucket.slots:
            buckets.setdefault(slot.name, bucket)
            slots.setdefault(slot.name, []).append(slot)
    places: dict[str, _Place] = {}
    for spec in layout.params:
        name = spec.name if spec.tied_to is None else spec.tied_to
        if name in buckets:
            # Slots are sorted by address, and a param runs through its addresses in the order of its
            # elements.
            places[spec.name] = places.get(name) or _Place(bucket=buckets[name], slots=tuple(slots[name]))
    return places


def _alignment_padding(bucket: Bucket, alignment: int) -> int:
    if bucket.mode == "flat":
        return bucket.numel - bucket.real_numel
    between = sum(align_up(slot.numel, alignment) - slot.numel for slot in bucket.slots)
    tallest = max((slot.offset + slot.numel for slot in bucket.slots), default=0)
    return between + bucket.num_ranks * (bucket.shard_numel - align_up(tallest, alignment))


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... {ranks[-1]}"
