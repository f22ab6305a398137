"""The memory of gradients: what is borrowed, what is kept, and that padding is zero whatever a buffer held before."""

from __future__ import annotations

import torch

from freehold.plan import Slot
from freehold.runtime.gradients import GradientBuffer
from freehold.runtime.pool import TensorPool


def _slot(offset: int, numel: int) -> Slot:
    return Slot(name=f"w{offset}", rank=1, offset=offset, start=0, stop=numel)


def test_every_gap_of_the_own_shard_is_zero_also_the_one_before_the_first_slot() -> None:
    pool = TensorPool()
    pool.give_back(torch.full((512,), float("nan")))
    owned = (_slot(128, 60), _slot(192, 10))
    grads = GradientBuffer(numel=512, own_start=256, owned=owned, like=torch.zeros(1), dtype=torch.float32, pool=pool)
    assert grads.open()
    assert grads.flat is not None
    for slot in owned:
        grads.flat[256 + slot.offset : 256 + slot.offset + slot.numel] = 7.0
    assert grads.keep_own()
    assert grads.flat is None
    expected = torch.zeros(202)
    for slot in owned:
        expected[slot.offset : slot.offset + slot.numel] = 7.0
    assert torch.equal(grads.own, expected)


def test_the_pool_lets_go_of_what_one_long_window_needed() -> None:
    pool = TensorPool()
    taken = [pool.take(size, torch.zeros(1)) for size in (10, 30, 20)]
    for tensor in taken:
        pool.give_back(tensor)
    pool.trim(2)
    assert pool.held_bytes() == 4 * (30 + 20)
