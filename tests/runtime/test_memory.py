"""Memory: what is predicted from the layout is what is held, and sharding saves what it promises."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from freehold import AdamW, LayerwiseOptimizer, Muon
from freehold.runtime import MemoryReport, predict_memory
from freehold.runtime.comm import LocalComm

STATE_FIELDS = {"whole": 1, "flat": 2}
ITEMSIZES = {"float32": 4, "bfloat16": 2}


def _live_bytes() -> int:
    """Bytes of all tensor storages that Python can reach; those shared by several tensors count once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # isinstance would wake lazy modules of torch; sparse tensors of other tests have no storage
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return models.TinyGPT(tied=False, width=64, num_layers=4).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    report: MemoryReport
    predicted: MemoryReport
    live_bytes: int
    full_state_bytes: int
    matrix_state_bytes: int
    param_bytes: int
    num_params: int


def _measure(dtype: torch.dtype, bucket_numel: int | str | None) -> Measured:
    before = _live_bytes()
    model = _model(dtype)
    param_bytes = _live_bytes() - before
    opt = LayerwiseOptimizer(model, matrix=Muon(lr=0.02), elementwise=AdamW(lr=1e-3), bucket_numel=bucket_numel)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    opt.step()
    opt.zero_grad()
    opt.synchronize()
    # Of what lives beside the buckets, only the transport's receive space has a size worth counting.
    pool = opt._comm._pool.held_bytes()  # type: ignore[attr-defined]
    live = _live_bytes() - before - pool
    matrices = {name: p for name, p in model.named_parameters() if models.is_matrix(name, p)}
    matrix_numel = sum(p.numel() for p in matrices.values())
    numel = sum(p.numel() for p in model.parameters())
    masters = numel if dtype == torch.bfloat16 else 0
    largest = max(p.numel() for p in matrices.values())
    predicted = predict_memory(opt.layout, dist.get_rank(), state_fields=STATE_FIELDS, itemsizes=ITEMSIZES)
    measured = Measured(
        report=opt.memory(),
        predicted=predicted,
        live_bytes=live,
        full_state_bytes=4 * (matrix_numel + 2 * (numel - matrix_numel) + masters),
        matrix_state_bytes=4 * largest * (2 if masters else 1),
        param_bytes=param_bytes,
        num_params=len(list(model.parameters())),
    )
    opt.close()
    return measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_state_per_rank(num_ranks: int, dtype: torch.dtype) -> None:
    """At most 1.02 x total / num_ranks + one matrix; and every byte that lives is in the report."""
    for m in run_ranks(num_ranks, _measure, dtype, "default"):
        bound = 1.02 * m.full_state_bytes / num_ranks + m.matrix_state_bytes
        assert m.report.optimizer_bytes <= bound, f"{m.report.optimizer_bytes} > {bound}"
        assert m.report == m.predicted
        reported = m.report.param_bytes + m.report.grad_bytes + m.report.master_bytes + m.report.state_bytes
        # Beside the buckets: a scalar for each param (its gradient marker) and scraps.
        assert reported <= m.live_bytes <= reported + 64 * m.num_params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_ranks_together_hold_the_state_once(dtype: torch.dtype) -> None:
    measured = run_ranks(3, _measure, dtype, 20_000)
    total, held = measured[0].full_state_bytes, sum(m.report.optimizer_bytes for m in measured)
    alignment = 3 * 63 * 4 * measured[0].num_params
    assert total <= held <= total + alignment
    assert all(m.report == m.predicted for m in measured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrapping_never_holds_the_weights_twice(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at when a bucket has just been packed: its params' old memory is free, the next bucket's not yet taken."""
    before = _live_bytes()
    model = _model(dtype)
    param_bytes = _live_bytes() - before
    live: list[int] = []
    monkeypatch.setattr(LocalComm, "broadcast_", lambda self, tensor: live.append(_live_bytes() - before))
    opt = LayerwiseOptimizer(model, matrix=Muon(lr=0.02), elementwise=AdamW(lr=1e-3), bucket_numel=20_000)
    assert len(live) == len(opt.layout.buckets) > 4
    beside_weights = 0
    for bucket, held in zip(opt._buckets, live, strict=True):
        padding = (
            sum(b.numel - b.real_numel for b in opt.layout.buckets[: bucket.index + 1]) * bucket.memory.weights.itemsize
        )
        assert held - beside_weights <= param_bytes + padding + 1024, f"at bucket {bucket.index}"
        memory = bucket.memory
        beside_weights += bucket.grads.nbytes + sum(t.nbytes for t in memory.state.values())
        beside_weights += memory.master.nbytes if bucket.master_is_copy else 0
    opt.close()


def _sharded(bucket_numel: int) -> tuple[MemoryReport, MemoryReport, MemoryReport, int]:
    """What is held, what was predicted, what is predicted for full gradients; and the most live bytes in a backward."""
    before = _live_bytes()
    model = models.TinyGPT(tied=False, width=64, num_layers=12)
    rules = {"matrix": Muon(lr=0.02), "elementwise": AdamW(lr=1e-3)}
    opt = LayerwiseOptimizer(model, **rules, bucket_numel=bucket_numel, grad_memory="sharded")
    for _ in range(5):
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    receive = opt._comm._pool.held_bytes()  # type: ignore[attr-defined]
    held = _live_bytes() - before - receive
    sizes = {"state_fields": STATE_FIELDS, "itemsizes": ITEMSIZES}
    predicted = [
        predict_memory(opt.layout, dist.get_rank(), grad_memory=kind, **sizes)  # type: ignore[arg-type]
        for kind in ("sharded", "full")
    ]
    report = opt.memory()
    opt.close()
    return report, predicted[0], predicted[1], held


def test_sharded_gradients_take_what_was_predicted_and_less_than_full_ones() -> None:
    num_params = len(list(models.TinyGPT(tied=False, width=64, num_layers=12).parameters()))
    for report, predicted, full, held in run_ranks(2, _sharded, 8192):
        assert report == predicted
        assert report.grad_bytes < 0.8 * full.grad_bytes
        reported = report.param_bytes + report.grad_bytes + report.master_bytes + report.state_bytes
        assert reported <= held <= reported + 64 * num_params


def test_named_params_report_the_same_memory() -> None:
    model = models.make("mlp")
    opt = LayerwiseOptimizer(model.named_parameters(), matrix=Muon(), elementwise=AdamW())
    numel = sum(p.numel() for p in model.parameters())
    matrix_numel = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert opt.memory().master_bytes == 0
    exact = 4 * matrix_numel + 8 * (numel - matrix_numel)
    assert exact <= opt.memory().state_bytes <= exact + 8 * 63 * len(list(model.parameters()))
    opt.close()
