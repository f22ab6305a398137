"""The three baselines give the layouts that Megatron-LM's planner gave, offset for offset."""

from __future__ import annotations

import gzip
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from freehold.plan import Layout, ParamSpec, plan

DATA = Path(__file__).parents[1] / "data" / "layouts.json.gz"


@cache
def recorded() -> list[dict[str, Any]]:
    cases = json.loads(gzip.decompress(DATA.read_bytes()))
    assert len(cases) == 505
    return cases


def specs_of(case: dict[str, Any]) -> list[ParamSpec]:
    """Entries that are not 2-D are one granule in the recorded planner."""
    alone = set(case["shared_embedding"])
    return [
        ParamSpec(
            name=str(index),
            shape=tuple(shape),
            granule_numel=None if len(shape) == 2 else math.prod(shape),
            isolated=index in alone,
        )
        for index, shape in enumerate(case["shapes"])
    ]


def addresses(layout: Layout) -> dict[str, Any]:
    found: list[list[int]] = []
    for spec in layout.params:
        bucket = layout.bucket_of(spec.name)
        (slot,) = layout.slots_of(spec.name)
        address = bucket.start + slot.rank * bucket.shard_numel + slot.offset
        assert layout.owner(spec.name) == slot.rank
        found.append([address, address + slot.numel, bucket.index])
    return {"index": found, "buckets": [[bucket.start, bucket.stop] for bucket in layout.buckets]}


@pytest.mark.parametrize("policy", ["threshold", "absorb", "ns_cost"])
def test_every_recorded_layout_is_reproduced_offset_for_offset(policy: str) -> None:
    for number, case in enumerate(recorded()):
        layout = plan(
            specs_of(case),
            num_ranks=case["dp_size"],
            bucket_numel=case["bucket_numel"],
            policy=policy,
            high_busbw=case["pad_for_high_busbw"],
        )
        assert addresses(layout) == case[policy], f"case {number} of {DATA.name}"
        assert layout.problems() == [], f"case {number} of {DATA.name}"


@pytest.mark.parametrize(("policy", "num_buckets", "num_slots"), [("threshold", 2, 160), ("absorb", 1, 128)])
def test_pr_5415_a_soft_minimum_fills_the_padding_of_128_equal_matrices(
    policy: str, num_buckets: int, num_slots: int
) -> None:
    numel = 2688 * 1856
    params = [ParamSpec(name=f"w{index}", shape=(2688, 1856)) for index in range(128)]
    layout = plan(params, num_ranks=32, bucket_numel=100 * numel, policy=policy)
    assert len(layout.buckets) == num_buckets
    assert layout.numel == num_slots * numel


def test_pr_5415_the_estimate_and_the_packing_of_absorb_disagree() -> None:
    backward = [192, 192, 256, 128, 128, 192]
    params = [ParamSpec(name=f"w{index}", shape=(numel, 1)) for index, numel in enumerate(reversed(backward))]
    assert plan(params, num_ranks=2, bucket_numel=448, policy="absorb").numel == 1408
