"""What a layout must fulfil so that the runtime may execute it without looking again."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from freehold.plan.bucket import Bucket, Slot
from freehold.plan.spec import ParamSpec

if TYPE_CHECKING:  # Layout.problems() calls this module, so that at run time it may not import Layout
    from freehold.plan.layout import Layout

__all__ = ["bucket_multiple", "find_problems"]


def bucket_multiple(num_ranks: int, *, high_busbw: bool) -> int:
    """What the size of every bucket is a multiple of, in elements.

    Example:
        >>> bucket_multiple(3, high_busbw=False)
        384
    """
    return math.lcm(num_ranks, 128, 2**16) if high_busbw else math.lcm(num_ranks, 128)


def find_problems(layout: Layout) -> list[str]:
    """Every violation in ``layout``, as sentences with names and numbers. Near-linear in slots."""
    problems = _check_numbers(layout)
    if problems:
        return problems  # nothing can be computed from a wrong number of ranks
    problems += _check_params(layout)
    problems += _check_frames(layout)
    for bucket in layout.buckets:
        problems += _check_slots(layout, bucket)
    problems += _check_coverage(layout)
    ready = _ready_positions(layout)
    problems += _check_order(ready)
    problems += _check_minimum(layout, ready)
    return problems


def _check_numbers(layout: Layout) -> list[str]:
    problems: list[str] = []
    if layout.num_ranks < 1:
        problems.append(f"num_ranks={layout.num_ranks} must be at least 1")
    if layout.alignment < 1 or layout.alignment & (layout.alignment - 1):
        problems.append(f"alignment={layout.alignment} must be a power of two")
    if layout.bucket_numel is not None and layout.bucket_numel < 1:
        problems.append(f"bucket_numel={layout.bucket_numel} must be at least 1, or None")
    return problems


def _check_params(layout: Layout) -> list[str]:
    counts = Counter(spec.name for spec in layout.params)
    problems = [f"param {name!r} is listed {count} times" for name, count in counts.items() if count > 1]
    sources = {spec.name: spec for spec in layout.params if spec.tied_to is None}
    for spec in layout.params:
        if spec.tied_to is not None and spec.tied_to not in sources:
            problems.append(f"param {spec.name!r} is tied to {spec.tied_to!r}, which is no untied param of the layout")
    return problems


def _check_frames(layout: Layout) -> list[str]:
    problems: list[str] = []
    multiple = bucket_multiple(layout.num_ranks, high_busbw=layout.high_busbw)
    start = 0
    for index, bucket in enumerate(layout.buckets):
        if bucket.index != index:
            problems.append(f"bucket {index} calls itself {bucket.index}")
        if bucket.start != start:
            problems.append(f"bucket {index} starts at {bucket.start}, expected {start}, where the one before it ends")
        if bucket.num_ranks != layout.num_ranks:
            problems.append(
                f"bucket {index} has {bucket.num_ranks} shards, but the layout has {layout.num_ranks} ranks"
            )
        if bucket.shard_numel < 1 or bucket.numel % multiple:
            problems.append(
                f"bucket {index} has {bucket.numel} elements ({bucket.num_ranks} x {bucket.shard_numel}), "
                f"which is no positive multiple of {multiple}"
            )
        if bucket.shard_numel % layout.alignment:
            problems.append(f"bucket {index}: shard_numel={bucket.shard_numel} is no multiple of {layout.alignment}")
        start = bucket.stop
    return problems


def _check_slots(layout: Layout, bucket: Bucket) -> list[str]:
    problems: list[str] = []
    if not bucket.slots:
        problems.append(f"bucket {bucket.index} holds no param")
    previous: Slot | None = None
    for slot in bucket.slots:
        where = f"bucket {bucket.index}: slot of {slot.name!r} at rank {slot.rank}, offset {slot.offset}"
        if not 0 <= slot.rank < layout.num_ranks:
            problems.append(f"{where}: the ranks are 0 to {layout.num_ranks - 1}")
        if slot.offset % layout.alignment:
            problems.append(f"{where} does not begin on a {layout.alignment}-element boundary")
        if slot.offset < 0 or slot.offset + slot.numel > bucket.shard_numel:
            problems.append(f"{where} with {slot.numel} elements leaves its shard of {bucket.shard_numel} elements")
        if previous is not None:
            if (previous.rank, previous.offset) > (slot.rank, slot.offset):
                problems.append(f"{where} is listed after a higher address: rank {previous.rank}, {previous.offset}")
            elif previous.rank == slot.rank and previous.offset + previous.numel > slot.offset:
                problems.append(f"{where} overlaps {previous.name!r} at offset {previous.offset} of that shard")
        previous = slot
    return problems


def _check_coverage(layout: Layout) -> list[str]:
    found: dict[str, list[tuple[Bucket, Slot]]] = {}
    for bucket in layout.buckets:
        for slot in bucket.slots:
            found.setdefault(slot.name, []).append((bucket, slot))
    problems: list[str] = []
    for spec in layout.params:
        pieces = found.pop(spec.name, [])
        if spec.tied_to is not None:
            if pieces:
                problems.append(f"param {spec.name!r} is tied to {spec.tied_to!r} but has {len(pieces)} slots")
        elif not pieces:
            problems.append(f"param {spec.name!r} has no slot")
        else:
            problems += _check_pieces(spec, pieces)
    problems += [f"{len(pieces)} slots name {name!r}, which is no param" for name, pieces in found.items()]
    return problems


def _check_pieces(spec: ParamSpec, pieces: list[tuple[Bucket, Slot]]) -> list[str]:
    """Invariants 1 to 3 for one param: exactly once, whole granules, one contiguous range of one bucket."""
    who = f"param {spec.name!r}"
    problems: list[str] = []
    indices = sorted({bucket.index for bucket, _ in pieces})
    if len(indices) > 1:
        problems.append(f"{who} lies in several buckets, {indices}")
    home = pieces[0][0]
    if (home.mode, home.dtype) != (spec.mode, spec.dtype):
        expected = f"a {spec.mode} bucket of {spec.dtype}"
        problems.append(f"{who} belongs in {expected}, but bucket {home.index} is a {home.mode} one of {home.dtype}")
    # A param runs through its bucket's addresses in the order of its elements: where element 0 would lie is
    # the same for all its slots.
    origins = {bucket.start + slot.rank * bucket.shard_numel + slot.offset - slot.start for bucket, slot in pieces}
    if len(origins) > 1:
        problems.append(f"{who} is not one contiguous range of bucket {home.index}")
    covered = 0
    for _, slot in sorted(pieces, key=lambda piece: (piece[1].start, piece[1].stop)):
        if slot.start >= slot.stop or slot.stop > spec.numel or slot.start < 0:
            problems.append(f"{who}: no elements {slot.start} to {slot.stop} among its {spec.numel}")
        elif slot.start > covered:
            problems.append(f"{who}: elements {covered} to {slot.start} are in no slot")
        elif slot.start < covered:
            problems.append(f"{who}: elements {slot.start} to {min(covered, slot.stop)} are in more than one slot")
        if slot.start % spec.granule or slot.stop % spec.granule:
            problems.append(
                f"{who}: the slot of elements {slot.start} to {slot.stop} on rank {slot.rank} cuts "
                f"a granule of {spec.granule} elements"
            )
        covered = max(covered, slot.stop)
    if covered < spec.numel:
        problems.append(f"{who}: elements {covered} to {spec.numel} are in no slot")
    return problems


def _ready_positions(layout: Layout) -> list[int]:
    """For each bucket the backward position at which it becomes ready; -1 if it holds no known param."""
    last = len(layout.params) - 1
    position = {spec.name: last - index for index, spec in enumerate(layout.params)}
    return [max((position.get(slot.name, -1) for slot in bucket.slots), default=-1) for bucket in layout.buckets]


def _check_order(ready: list[int]) -> list[str]:
    return [
        f"bucket {index} becomes ready at backward position {ready[index]}, "
        f"before bucket {index - 1} at {ready[index - 1]}"
        for index in range(1, len(ready))
        if ready[index] < ready[index - 1]
    ]


def _check_minimum(layout: Layout, ready: list[int]) -> list[str]:
    """Invariant 6, and that isolated params are alone.

    A bucket may stay below ``bucket_numel`` if no later bucket of its mode and dtype could have taken part in
    it: it is the last one, or an isolated param becomes ready between it and the next one.
    """
    problems: list[str] = []
    isolated = {spec.name for spec in layout.params if spec.isolated and spec.tied_to is None}
    next_ready: dict[tuple[str, str], int] = {}
    barrier: dict[tuple[str, str], int] = {}
    for bucket, position in reversed(list(zip(layout.buckets, ready, strict=True))):
        group = (bucket.mode, bucket.dtype)
        names = {slot.name for slot in bucket.slots}
        if names & isolated:
            barrier[group] = position
            if len(names) > 1:
                problems.append(f"bucket {bucket.index} holds isolated {sorted(names & isolated)} and other params")
            continue
        if group in next_ready and not position < barrier.get(group, -1) < next_ready[group]:
            problems += _below_minimum(layout, bucket)
        next_ready[group] = position
    return problems


def _below_minimum(layout: Layout, bucket: Bucket) -> list[str]:
    if layout.bucket_numel is None:
        return [f"bucket {bucket.index} is not the only one of {bucket.mode} {bucket.dtype}, but bucket_numel is None"]
    if bucket.real_numel < layout.bucket_numel:
        return [
            f"bucket {bucket.index} has {bucket.real_numel} real elements, less than bucket_numel={layout.bucket_numel}"
        ]
    return []
