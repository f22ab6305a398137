"""A layout as data: lookups, text form, fingerprint, and the checks that find every broken invariant."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import freehold
from freehold.errors import LayoutError
from freehold.plan import Bucket, Layout, PackedBucket, ParamSpec, Placement, Problem, Slot, plan


def over_both_ranks(problem: Problem) -> tuple[PackedBucket, ...]:
    """Bucket 0: ``last`` and ``second`` on rank 0 and 1. Bucket 1: the stack over both ranks."""
    last, second, stack = (item.index for item in problem.items)
    return (
        PackedBucket(
            placements=(
                Placement(index=last, rank=0, offset=0),
                Placement(index=second, rank=1, offset=64),
            ),
            shard_numel=192,
        ),
        PackedBucket(placements=(Placement(index=stack, rank=0, offset=0),), shard_numel=128),
    )


PARAMS = (
    ParamSpec(name="embedding", shape=(40, 8), rule="elementwise"),
    ParamSpec(name="stack", shape=(3, 8, 8)),
    ParamSpec(name="second", shape=(10, 10)),
    ParamSpec(name="last", shape=(8, 16)),
    ParamSpec(name="head", shape=(40, 8), rule="elementwise", tied_to="embedding"),
)


def sound() -> Layout:
    layout = plan(PARAMS, num_ranks=2, bucket_numel=200, policy=over_both_ranks)
    assert layout.problems() == []
    assert [bucket.mode for bucket in layout.buckets] == ["whole", "whole", "flat"]
    return layout


def test_lookups() -> None:
    layout = sound()
    assert layout.policy == "over_both_ranks"
    assert (layout.owner("last"), layout.owner("second")) == (0, 1)
    assert layout.bucket_of("stack") is layout.buckets[1]
    assert layout.slots_of("stack") == (
        Slot(name="stack", rank=0, offset=0, start=0, stop=128),
        Slot(name="stack", rank=1, offset=0, start=128, stop=192),
    )
    assert layout.slots_of("head") == layout.slots_of("embedding") != ()
    assert layout.buckets[0].slots_of_rank(1) == layout.slots_of("second")
    assert layout.buckets[0].slots_of_rank(2) == ()


def test_a_param_on_several_ranks_has_no_owner() -> None:
    with pytest.raises(LayoutError, match=r"'stack' has no single owner.* 2 ranks, 0, 1"):
        sound().owner("stack")
    with pytest.raises(ValueError, match="head"):
        sound().owner("head")


@pytest.mark.parametrize("lookup", ["owner", "bucket_of", "slots_of"])
def test_an_unknown_name_is_named(lookup: str) -> None:
    with pytest.raises(LayoutError, match=r"no param 'stak' in this layout of 5 params"):
        getattr(sound(), lookup)("stak")


def test_sizes_and_padding_by_cause() -> None:
    layout = sound()
    assert layout.real_numel == 320 + 192 + 100 + 128
    assert [bucket.numel for bucket in layout.buckets] == [384, 256, 384]
    assert [bucket.start for bucket in layout.buckets] == [0, 384, 640]
    assert layout.numel == 1024 == layout.buckets[-1].stop
    # second: 28 to its next boundary; the flat bucket: 64 behind its end; the rest is uneven shards.
    assert layout.padding_by_cause.alignment == 28 + 64
    assert layout.padding_by_cause.imbalance == 1024 - 740 - 92


def test_json_is_an_exact_inverse_and_survives_pickling_and_copying() -> None:
    layout = sound()
    layout.owner("last")  # whatever lookups cache must not show
    text = layout.to_json()
    again = Layout.from_json(text)
    assert again == layout
    assert again.to_json() == text
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert copy.deepcopy(layout) == layout
    assert hash(again) == hash(layout)
    assert replace(layout, policy="other").owner("last") == 0


def test_numbers_past_two_to_the_53_survive_json() -> None:
    params = [ParamSpec(name="huge", shape=(2**30 + 1, 2**27 + 1))]
    layout = plan(params, num_ranks=3)
    again = Layout.from_json(layout.to_json())
    assert again.slots_of("huge")[0].stop == (2**30 + 1) * (2**27 + 1)
    assert again == layout


FINGERPRINT = "d6ae541188f5caf8efa3f2005376dfbcd9075b4916a9a25d15267bea48a178e8"
"""Of ``sound()``. If this test fails the text form has changed: raise the version in layout.py."""


def test_the_fingerprint_is_the_same_in_every_release() -> None:
    assert sound().fingerprint() == FINGERPRINT


def test_the_fingerprint_tells_layouts_apart() -> None:
    layout = sound()
    renamed = replace(layout, params=(*layout.params[:-1], replace(layout.params[-1], isolated=True)))
    others = [replace(layout, alignment=32), replace(layout, high_busbw=True), renamed]
    assert len({layout.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_the_fingerprint_does_not_depend_on_the_process() -> None:
    script = (
        "from freehold.plan import ParamSpec, plan\n"
        "params = [ParamSpec(name=f'w{i}', shape=(i % 7 + 1, 30), dtype=d, rule=r)"
        " for i in range(40) for d in ['float32'] for r in [('matrix', 'elementwise')[i % 3 == 0]]]\n"
        "print(*[plan(params, num_ranks=5, bucket_numel=900, policy=p).fingerprint()"
        " for p in ('threshold', 'absorb', 'ns_cost')])\n"
    )
    root = str(Path(freehold.__file__).parents[1])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    ]
    assert len(outputs[0].split()) == 3
    assert outputs[1:] == outputs[:1] * 2


def with_bucket(layout: Layout, which: int, /, **changes: Any) -> Layout:
    buckets = list(layout.buckets)
    buckets[which] = replace(buckets[which], **changes)
    return replace(layout, buckets=tuple(buckets))


def with_slot(layout: Layout, bucket: int, slot: int, /, **changes: Any) -> Layout:
    slots = list(layout.buckets[bucket].slots)
    slots[slot] = replace(slots[slot], **changes)
    return with_bucket(layout, bucket, slots=tuple(slots))


def swapped(layout: Layout) -> Layout:
    first, second, *rest = layout.buckets
    start = second.numel
    moved = (replace(second, index=0, start=0), replace(first, index=1, start=start), *rest)
    return replace(layout, buckets=moved)


def split_over_buckets(layout: Layout) -> Layout:
    piece = Slot(name="stack", rank=0, offset=128, start=128, stop=192)
    first, second, *rest = layout.buckets
    slots = (first.slots[0], piece, first.slots[1])
    return replace(
        layout,
        buckets=(replace(first, slots=slots), replace(second, slots=second.slots[:1]), *rest),
    )


def with_param(layout: Layout, index: int, /, **changes: Any) -> Layout:
    params = list(layout.params)
    params[index] = replace(params[index], **changes)
    return replace(layout, params=tuple(params))


def doubled(layout: Layout) -> Layout:
    slots = layout.buckets[0].slots
    return with_bucket(layout, 0, slots=(slots[0], replace(slots[0], offset=128 - 64, stop=64), slots[1]))


CORRUPTED: dict[str, tuple[Callable[[Layout], Layout], str]] = {
    # 1. every element in exactly one slot; no overlap; aligned offsets
    "element missing": (lambda x: with_slot(x, 0, 1, stop=99), "'second': elements 99 to 100 are in no slot"),
    "gap inside": (lambda x: with_slot(x, 1, 1, start=130), "'stack': elements 128 to 130 are in no slot"),
    "element twice": (doubled, "'last': elements 0 to 64 are in more than one slot"),
    "beyond the param": (lambda x: with_slot(x, 0, 1, stop=101), "no elements 0 to 101 among its 100"),
    "empty slot": (lambda x: with_slot(x, 0, 1, stop=0), "'second': no elements 0 to 0"),
    "param missing": (lambda x: with_bucket(x, 0, slots=x.buckets[0].slots[:1]), "'second' has no slot"),
    "unknown param": (lambda x: with_slot(x, 0, 1, name="?"), "1 slots name '?', which is no param"),
    "tied param placed": (
        lambda x: with_slot(x, 2, 0, name="head"),
        "'head' is tied to 'embedding' but has 1",
    ),
    "overlap": (
        lambda x: with_slot(x, 0, 1, rank=0),
        "'second' at rank 0, offset 64 overlaps 'last' at offset 0",
    ),
    "unaligned": (lambda x: with_slot(x, 0, 1, offset=65), "offset 65 does not begin on a 64-element"),
    "outside the shard": (lambda x: with_slot(x, 0, 1, offset=128), "100 elements leaves its shard of 192"),
    "negative offset": (lambda x: with_slot(x, 0, 0, offset=-64), "offset -64 with 128 elements leaves"),
    "no such rank": (lambda x: with_slot(x, 0, 1, rank=2), "the ranks are 0 to 1"),
    "order of slots": (lambda x: with_bucket(x, 0, slots=x.buckets[0].slots[::-1]), "after a higher address"),
    # 2. whole granules
    "granule cut": (lambda x: with_param(x, 1, granule_numel=96), "cuts a granule of 96 elements"),
    "matrix in a flat bucket": (
        lambda x: with_bucket(x, 0, mode="flat"),
        "belongs in a whole bucket of bfloat16",
    ),
    "wrong dtype": (lambda x: with_bucket(x, 2, dtype="float32"), "bucket 2 is a flat one of float32"),
    # 3. one contiguous range
    "not contiguous": (
        lambda x: with_slot(x, 1, 1, offset=64),
        "'stack' is not one contiguous range of bucket 1",
    ),
    "several buckets": (split_over_buckets, "'stack' lies in several buckets, [0, 1]"),
    # 4. sizes
    "bucket size": (lambda x: with_bucket(x, 2, shard_numel=224), "no positive multiple of 128"),
    "high_busbw": (lambda x: replace(x, high_busbw=True), "no positive multiple of 65536"),
    "number of shards": (
        lambda x: with_bucket(x, 2, num_ranks=3),
        "has 3 shards, but the layout has 2 ranks",
    ),
    "shard size": (lambda x: replace(x, alignment=256), "shard_numel=192 is no multiple of 256"),
    "start": (lambda x: with_bucket(x, 1, start=512), "bucket 1 starts at 512, expected 384"),
    "index": (lambda x: with_bucket(x, 1, index=7), "bucket 1 calls itself 7"),
    "empty bucket": (lambda x: with_bucket(x, 2, slots=()), "bucket 2 holds no param"),
    # 5. order
    "order of buckets": (swapped, "bucket 1 becomes ready at backward position 2, before bucket 0 at 3"),
    # 6. minimum
    "too small": (
        lambda x: replace(x, bucket_numel=229),
        "bucket 0 has 228 real elements, less than bucket_numel=229",
    ),
    "not one bucket": (lambda x: replace(x, bucket_numel=None), "not the only one of whole bfloat16"),
    "not alone": (lambda x: with_param(x, 2, isolated=True), "holds isolated ['second'] and other params"),
    # what the others are measured with
    "ranks": (lambda x: replace(x, num_ranks=0), "num_ranks=0 must be at least 1"),
    "alignment": (lambda x: replace(x, alignment=48), "alignment=48 must be a power of two"),
    "minimum": (lambda x: replace(x, bucket_numel=0), "bucket_numel=0 must be at least 1"),
    "listed twice": (lambda x: replace(x, params=(*x.params, x.params[2])), "'second' is listed 2 times"),
    "tied to nothing": (lambda x: with_param(x, 4, tied_to="wte"), "tied to 'wte', which is no untied param"),
}


@pytest.mark.parametrize("corruption", CORRUPTED)
def test_problems_finds_each_corruption_and_names_it(corruption: str) -> None:
    corrupt, expected = CORRUPTED[corruption]
    problems = corrupt(sound()).problems()
    assert any(expected in problem for problem in problems), problems


def test_problems_reports_all_violations_at_once() -> None:
    layout = with_slot(with_slot(with_bucket(sound(), 2, index=9), 0, 1, offset=65), 1, 1, stop=190)
    problems = "\n".join(layout.problems())
    for expected in (
        "calls itself 9",
        "offset 65 does not begin",
        "'stack': elements 190 to 192 are in no slot",
    ):
        assert expected in problems


def test_a_bucket_that_an_isolated_param_closed_may_be_small() -> None:
    params = [
        ParamSpec(name="a", shape=(8, 8)),
        ParamSpec(name="b", shape=(8, 8), isolated=True),
        ParamSpec(name="c", shape=(8, 8)),
    ]
    layout = plan(params, num_ranks=2, bucket_numel=10_000, policy="absorb")
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["c"], ["b"], ["a"]]
    assert layout.problems() == []
    merged = with_param(layout, 1, isolated=False)
    assert len(merged.problems()) == 2


def edit(**changes: Any) -> str:
    return json.dumps({**json.loads(sound().to_json()), **changes})


def edit_bucket(**changes: Any) -> str:
    record = json.loads(sound().to_json())
    record["buckets"][1].update(changes)
    return json.dumps(record)


def without(key: str) -> str:
    record = json.loads(sound().to_json())
    del record[key]
    return json.dumps(record)


MALFORMED = {
    "no JSON": ("{", "must be JSON text"),
    "no object": ("[]", r"must be a JSON object, got \[\]"),
    "another format": (edit(format="onnx"), "expected a 'freehold.layout' of version 1, got 'onnx'"),
    "another version": (edit(version=2), "of version 2"),
    "missing key": (without("alignment"), "layout has no 'alignment'"),
    "unknown key": (edit(colour="red"), r"layout has unknown keys \['colour'\]"),
    "bool for int": (edit(num_ranks=True), "layout.num_ranks: expected an integer, got True"),
    "float for int": (edit(bucket_numel=1.0), "layout.bucket_numel: expected an integer, got 1.0"),
    "int for bool": (edit(high_busbw=0), "layout.high_busbw: expected true or false, got 0"),
    "int for string": (edit(policy=3), "layout.policy: expected a string, got 3"),
    "object for list": (edit(buckets={}), "layout.buckets: expected a list"),
    "string for object": (edit(params=["w"]), r"layout.params\[0\]: expected an object, got 'w'"),
    "bad mode": (
        edit_bucket(mode="round"),
        r"layout.buckets\[1\].mode: expected 'whole' or 'flat', got 'round'",
    ),
    "bad slot": (edit_bucket(slots=[{"name": "w"}]), r"layout.buckets\[1\].slots\[0\] has no 'rank'"),
    "bad shape": (
        edit(params=[{**json.loads(sound().to_json())["params"][0], "shape": [0, 8]}]),
        r"layout.params\[0\]: param 'embedding': every size",
    ),
    "bad rule": (
        edit(params=[{**json.loads(sound().to_json())["params"][0], "rule": "lamb"}]),
        r"layout.params\[0\].rule: expected 'matrix' or 'elementwise', got 'lamb'",
    ),
    "inconsistent": (edit_bucket(start=0), "inconsistent:\n  bucket 1 starts at 0, expected 384"),
}


@pytest.mark.parametrize("malformation", MALFORMED)
def test_malformed_text_is_refused_with_the_place_and_the_reason(malformation: str) -> None:
    text, message = MALFORMED[malformation]
    with pytest.raises(LayoutError, match=message):
        Layout.from_json(text)


def test_lookups_are_constant_time_after_the_first() -> None:
    class Counted(tuple[Bucket, ...]):
        scans = 0

        def __iter__(self):
            type(self).scans += 1
            return super().__iter__()

    layout = sound()
    layout = replace(layout, buckets=Counted(layout.buckets))
    for _ in range(10):
        layout.owner("last")
        layout.slots_of("head")
        layout.bucket_of("stack")
    assert Counted.scans == 1
