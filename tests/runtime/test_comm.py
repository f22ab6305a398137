"""Transports against a plain sum, and how long they hold what is in flight."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from fake_comm import poison_freed_memory
from ranks import run_ranks
from torch import Tensor

from freehold import AdamW, LayerwiseOptimizer, Muon
from freehold.runtime.comm import Comm, GlooComm, LocalComm, NativeComm, Pending, make_comm
from freehold.runtime.pool import TensorPool

CPU = torch.device("cpu")
TRANSPORTS = ("gloo", "native")


def _transport(kind: str) -> Comm:
    group = dist.group.WORLD
    return GlooComm(group, CPU, stripe=3) if kind == "gloo" else NativeComm(group, CPU)


def _flat(rank: int, shard_numel: int, num_ranks: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(num_ranks * shard_numel, generator=generator).to(dtype)


def _plain_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


# ---- collectives ----


def _collectives(kind: str) -> None:
    comm = _transport(kind)
    r, n = comm.rank, comm.num_ranks
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        sizes = (64, 1, 1000)
        mine = [_flat(r, size, n, dtype, seed) for seed, size in enumerate(sizes)]
        pending = [comm.reduce_scatter(flat, bucket) for bucket, flat in enumerate(mine)]
        for handle in pending:
            handle.wait()
        for seed, size in enumerate(sizes):
            total = _plain_sum([_flat(rank, size, n, dtype, seed) for rank in range(n)])
            own = comm.own_shard(mine[seed])
            wanted = comm.own_shard(total)
            if kind == "gloo":
                assert torch.equal(own, wanted), "the sum is not taken in rank order"
            else:
                rounding = 0.1 if dtype == torch.bfloat16 else 1e-6  # of sums of up to four normal numbers
                torch.testing.assert_close(own, wanted, rtol=0, atol=rounding)
        _gathers(comm, mine, sizes, dtype)


def _gathers(comm: Comm, mine: list[Tensor], sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    r, n = comm.rank, comm.num_ranks
    mine = [_flat(r, size, n, dtype, seed) for seed, size in enumerate(sizes)]
    pending = [comm.all_gather(flat, bucket) for bucket, flat in enumerate(mine)]
    for handle in reversed(pending):  # waited for in any order
        handle.wait()
    for seed, size in enumerate(sizes):
        everyone = [_flat(rank, size, n, dtype, seed) for rank in range(n)]
        wanted = torch.cat([everyone[rank][rank * size : (rank + 1) * size] for rank in range(n)])
        assert torch.equal(mine[seed], wanted)


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_reduce_scatter_and_all_gather(num_ranks: int, kind: str) -> None:
    run_ranks(num_ranks, _collectives, kind)


def _sum_by_every_owner() -> Tensor:
    comm = _transport("gloo")
    part = _flat(comm.rank, 257, 1, torch.float32)
    flat = part.repeat(comm.num_ranks)
    comm.reduce_scatter(flat, 0).wait()
    return comm.own_shard(flat).clone()


def test_a_sum_has_the_same_bits_whoever_owns_it() -> None:
    first, *rest = run_ranks(4, _sum_by_every_owner)
    assert all(torch.equal(first, other) for other in rest)
    parts = [_flat(rank, 257, 1, torch.float32) for rank in range(4)]
    assert torch.equal(first, _plain_sum(parts))
    assert not torch.equal(first, _plain_sum(parts[::-1])), "these numbers add up alike in any order: nothing is tested"


def _shared_tags() -> None:
    """Buckets 510 apart share a tag and may be under way together."""
    comm = _transport("gloo")
    buckets = (0, 510, 1020, 5, 515)
    mine = [_flat(comm.rank, 32, comm.num_ranks, torch.float32, bucket) for bucket in buckets]
    assert comm._tag_of(0, 0) == comm._tag_of(510, 0) != comm._tag_of(0, 1)  # type: ignore[attr-defined]
    pending = [comm.reduce_scatter(flat, bucket) for bucket, flat in zip(buckets, mine, strict=True)]
    for handle in pending:
        handle.wait()
    for bucket, flat in zip(buckets, mine, strict=True):
        total = _plain_sum([_flat(rank, 32, comm.num_ranks, torch.float32, bucket) for rank in range(comm.num_ranks)])
        assert torch.equal(comm.own_shard(flat), comm.own_shard(total)), f"{bucket=}"


def test_more_buckets_than_tags() -> None:
    run_ranks(3, _shared_tags)


def _control(kind: str) -> None:
    comm = _transport(kind)
    r = comm.rank
    tensors = (
        torch.full((3,), float(r)),
        torch.tensor([r == 0, True, r == 1]),
        torch.full((2, 3), r, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).t() * (1 + r),
        torch.tensor(r, dtype=torch.int64),
        torch.empty(0),
    )
    for tensor in tensors:
        comm.broadcast_(tensor)
    assert torch.equal(tensors[0], torch.zeros(3))
    assert tensors[1].tolist() == [True, True, False]
    assert torch.equal(tensors[2], torch.zeros(2, 3, dtype=torch.bfloat16))
    assert torch.equal(tensors[3], torch.arange(6.0).reshape(2, 3).t())
    assert tensors[4].item() == 0
    rows = comm.exchange(torch.tensor([r, 10 * r]))
    assert rows.tolist() == [[rank, 10 * rank] for rank in range(comm.num_ranks)]
    flags = torch.tensor([r == 1, r == 0, False], dtype=torch.uint8)
    assert comm.max_(flags) is flags
    assert flags.tolist() == [1, 1, 0]
    assert comm.gather_objects({"rank": r}) == [{"rank": rank} for rank in range(comm.num_ranks)]


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_control_collectives(kind: str) -> None:
    run_ranks(2, _control, kind)


def _lengths() -> None:
    """Around the size of a control message, and of different length on each rank."""
    comm = _transport("gloo")
    for numel in (1, 239, 240, 241, 255, 5000):
        flags = torch.zeros(numel, dtype=torch.uint8)
        flags[comm.rank % numel] = 1
        expected = torch.zeros_like(flags)
        expected[[rank % numel for rank in range(comm.num_ranks)]] = 1
        assert torch.equal(comm.max_(flags), expected), f"{numel=}"
        row = torch.arange(numel, dtype=torch.float64) * (comm.rank + 1)
        rows = comm.exchange(row)
        assert torch.equal(rows, torch.stack([row / (comm.rank + 1) * (r + 1) for r in range(comm.num_ranks)]))
        found = comm.gather_objects("x" * (numel * comm.rank))
        assert found == ["x" * (numel * rank) for rank in range(comm.num_ranks)]


def test_control_messages_of_any_length() -> None:
    run_ranks(3, _lengths)


def test_a_group_of_one_moves_nothing() -> None:
    comm = make_comm(None, CPU)
    assert isinstance(comm, LocalComm)
    flat = torch.arange(4.0)
    comm.reduce_scatter(flat, 0).wait()
    comm.all_gather(flat, 0).wait()
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(comm.own_shard(flat), flat)
    assert comm.gather_objects("x") == ["x"]
    assert comm.exchange(torch.tensor([1, 2])).tolist() == [[1, 2]]


# ---- receive space ----


def test_receive_space_is_used_again() -> None:
    pool = TensorPool()
    like = torch.zeros(1)
    first = pool.take(100, like)
    pool.give_back(first)
    assert pool.take(80, like) is first
    assert pool.held_bytes() == 0
    second = pool.take(80, like)
    assert second is not first
    pool.give_back(first)
    pool.give_back(second)
    assert pool.held_bytes() == 4 * 180
    assert pool.take(100, like) is first, "the fitting one, although another lies before it"


def test_receive_space_grows_instead_of_piling_up() -> None:
    pool = TensorPool()
    like = torch.zeros(1)
    for numel in (10, 20, 40, 30, 40):
        pool.give_back(pool.take(numel, like))
    assert pool.held_bytes() == 4 * 40


def test_receive_space_is_kept_apart_by_dtype() -> None:
    pool = TensorPool()
    pool.give_back(pool.take(100, torch.zeros(1)))
    taken = pool.take(50, torch.zeros(1, dtype=torch.bfloat16))
    assert taken.dtype == torch.bfloat16
    assert pool.held_bytes() == 400


def _pool_after_training() -> tuple[int, int]:
    model = models.make("gpt")
    opt = LayerwiseOptimizer(model, matrix=Muon(), elementwise=AdamW(), bucket_numel=1500)
    held = []
    for step in range(8):
        models.loss_of(model, models.batch("gpt", torch.Generator().manual_seed(step))).backward()
        opt.step()
        opt.zero_grad()
        held.append(opt._comm._pool.held_bytes())  # type: ignore[attr-defined]
    largest = max(bucket.numel for bucket in opt.layout.buckets) * 4
    opt.close()
    # Buckets differ in size: while it is settled which tensor serves which, each may be replaced by a larger one.
    assert len(set(held[-3:])) == 1, f"receive space grows from step to step: {held}"
    return held[-1], largest


def test_receive_space_is_bounded_in_training() -> None:
    for held, largest in run_ranks(2, _pool_after_training):
        assert 0 < held <= GlooComm.max_in_flight * largest


# ---- lifetimes ----


class FakeGroup:
    """Rank 0 of two; the other sends ``peer``. Reads and writes in ``wait()``, and keeps no tensor until then."""

    def __init__(self, peer: Tensor) -> None:
        self.peer = peer
        self.sent: list[Tensor] = []
        self.dropped: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda group: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "isend", lambda tensor, **rest: FakeWork(self, tensor, self._send))
        monkeypatch.setattr(dist, "irecv", lambda tensor, **rest: FakeWork(self, tensor, self._receive))

    def _send(self, tensor: Tensor) -> None:
        self.sent.append(tensor.clone())

    def _receive(self, tensor: Tensor) -> None:
        tensor.copy_(self.peer[: tensor.numel()])


class FakeWork:
    """Knows its tensor only by place: a weak reference to the memory's owner, and where in it the tensor lies."""

    def __init__(self, group: FakeGroup, tensor: Tensor, transfer: Any) -> None:
        self._group = group
        self._memory = weakref.ref(tensor if tensor._base is None else tensor._base)
        self._place = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self._transfer = transfer
        self._done = False

    def wait(self, timeout: Any = None) -> None:
        gc.collect()
        poison_freed_memory(self._place[0].numel())
        memory = self._memory()
        assert memory is not None, "a tensor in flight was let go before wait()"
        self._transfer(memory.as_strided(*self._place))
        self._done = True

    def __del__(self) -> None:
        if not self._done:
            self._group.dropped.append("a handle was dropped before wait()")


def test_b31_everything_in_flight_is_referenced_until_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 64
    peer, mine = _flat(1, n, 1, torch.float32), _flat(0, n, 2, torch.float32)
    group = FakeGroup(peer)
    group.install(monkeypatch)
    comm = GlooComm(None, CPU, stripe=0)  # type: ignore[arg-type]

    def start(kind: str) -> tuple[Pending, weakref.ref[Tensor]]:
        flat = mine.clone()
        return getattr(comm, kind)(flat, 0), weakref.ref(flat)

    for kind in ("reduce_scatter", "all_gather"):
        group.sent.clear()
        pending, flat = start(kind)
        gc.collect()
        assert flat() is not None, f"{kind} does not keep its buffer"
        assert group.dropped == []
        result = flat()
        pending.wait()
        own, other = result[:n], result[n:]
        assert torch.equal(group.sent[0], mine[n:] if kind == "reduce_scatter" else mine[:n])
        if kind == "reduce_scatter":
            assert torch.equal(own, mine[:n] + peer)
        else:
            assert torch.equal(own, mine[:n])
            assert torch.equal(other, peer)
        del result, own, other
        gc.collect()
        assert flat() is None, f"{kind} keeps its buffer after wait()"
        assert group.dropped == []
        pending.wait()  # a second time: nothing
