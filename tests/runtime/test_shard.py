"""Where a rank's parts of a bucket, and their state by element, row and matrix, lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from freehold.plan import ParamSpec, plan
from freehold.runtime.params import ManagedParam
from freehold.runtime.shard import shard_parts


def _managed(spec: ParamSpec, index: int) -> ManagedParam:
    return ManagedParam(
        name=spec.name,
        param=nn.Parameter(torch.zeros(spec.shape)),
        index=index,
        bucket=0,
        group=0,
        slots=(),
        matrix_shape=spec.matrix_shape,
        grad_view=None,
        grad_dtype=torch.float32,
    )


SPECS = (
    ParamSpec(name="up", shape=(6, 8)),
    ParamSpec(name="experts", shape=(5, 4, 8)),
    ParamSpec(name="conv", shape=(4, 2, 3, 3), granule_numel=72),
    ParamSpec(name="scale", shape=(3, 7), rule="elementwise", granule_numel=21),
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parts_follow_each_other_and_cover_every_row_and_matrix_once(num_ranks: int) -> None:
    layout = plan(SPECS, num_ranks=num_ranks, bucket_numel=None)
    params = [_managed(spec, index) for index, spec in enumerate(SPECS)]
    rows: dict[str, list[int]] = {spec.name: [] for spec in SPECS}
    matrices: dict[str, list[int]] = {spec.name: [] for spec in SPECS}
    for bucket in layout.buckets:
        for rank in range(num_ranks):
            row = matrix = 0
            slots = bucket.slots_of_rank(rank)
            for part, slot in zip(shard_parts(slots, params), slots, strict=True):
                assert (part.slot, part.param.name) == (slot, slot.name)
                assert part.elements == slice(slot.offset, slot.offset + slot.numel)
                assert (part.rows.start, part.matrices.start) == (row, matrix)
                row, matrix = part.rows.stop, part.matrices.stop
                if part.num_matrices:
                    rows[slot.name] += range(part.first_row, part.first_row + part.rows.stop - part.rows.start)
                    matrices[slot.name] += range(part.first_matrix, part.first_matrix + part.num_matrices)
    assert {name: sorted(found) for name, found in rows.items()} == {
        "up": list(range(6)), "experts": list(range(20)), "conv": list(range(4)), "scale": [],
    }  # fmt: skip
    assert {name: sorted(found) for name, found in matrices.items()} == {
        "up": [0], "experts": list(range(5)), "conv": [0], "scale": [],
    }  # fmt: skip


def test_what_is_no_matrix_has_no_rows_and_one_dict() -> None:
    layout = plan(SPECS[3:], num_ranks=1)
    (part,) = shard_parts(layout.buckets[0].slots, [_managed(SPECS[3], 0)])
    assert (part.rows, part.matrices, part.num_matrices) == (slice(0, 0), slice(0, 1), 0)
    with pytest.raises(AssertionError, match="is no matrix"):
        part.first_row  # noqa: B018  the property raises
