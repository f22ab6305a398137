"""A checkpoint knows names, not ranks: whatever saved it, anything can load it, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from ranks import run_ranks

import freehold
from freehold.runtime.checkpoint.manifest import read_manifest

STEPS = 3


def _save(path: str, dtype: torch.dtype, how: str, *, with_extra: bool = True) -> dict[str, Any]:
    net = worlds.make(dtype)
    opt = worlds.wrap(net)
    worlds.train(net, opt, 0, STEPS)
    extra = {"step": STEPS, "random": torch.get_rng_state()} if with_extra else None
    if how == "save":
        freehold.save(path, net, opt, extra=extra)
    else:
        saving = freehold.async_save(path, net, opt, extra=extra)
        worlds.train(net, opt, STEPS, STEPS + 1)  # goes on, and must not reach the file
        saving.wait()
        freehold.load(path, net, opt)
    found = worlds.everything(net, opt)
    opt.close()
    return found


def _load(path: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    net = worlds.make(dtype, seed=100 + rank)
    opt = worlds.wrap(net, **options)
    worlds.train(net, opt, 50, 52)
    extra = freehold.load(path, net, opt)
    assert extra["step"] == STEPS
    assert extra["random"].dtype == torch.uint8
    raw = {name: p.detach().clone() for name, p in net.named_parameters()}  # before any forward, and with no guard
    found = worlds.everything(net, opt)
    worlds.assert_equal({f"model {name}": value for name, value in raw.items()}, found)
    for p in opt._params:
        if f"master {p.name}" in found:
            worlds.assert_equal({"": found[f"master {p.name}"].to(p.param.dtype)}, {"": p.param.detach()}, p.name)
    assert [group["lr"] for group in opt.param_groups] == [3e-3, 0.02, 3e-3]
    opt.verify()
    opt.close()
    return found


@pytest.fixture(scope="module")
def saved_at_2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By dtype: a checkpoint, and what was saved."""
    folder, found = tmp_path_factory.mktemp("saved"), {}
    for dtype, how in ((torch.float32, "save"), (torch.bfloat16, "async_save")):
        path = str(folder / how)
        found[dtype] = path, run_ranks(2, _save, path, dtype, how)[0]
    return found


@pytest.mark.parametrize(
    ("num_ranks", "options", "dtype"),
    [
        (1, {"bucket_numel": None, "policy": "packed"}, torch.float32),
        (1, {"bucket_numel": 100, "policy": "packed"}, torch.bfloat16),
        (3, {"bucket_numel": 100, "policy": "threshold"}, torch.float32),
        (4, {"bucket_numel": 2000, "policy": "absorb"}, torch.bfloat16),
        (2, {"bucket_numel": 100, "grad_memory": "sharded"}, torch.bfloat16),
        (2, {"bucket_numel": 100, "early_update": True, "on_nonfinite": "ignore"}, torch.float32),
        pytest.param(7, {"bucket_numel": 300, "policy": "ns_cost"}, torch.bfloat16),
        pytest.param(3, {"bucket_numel": None, "policy": "packed"}, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(4, {"bucket_numel": 100, "policy": "ns_cost"}, torch.float32, marks=pytest.mark.slow),
        pytest.param(7, {"bucket_numel": 300, "policy": "packed"}, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_b12_saved_at_2_ranks_loads_at_any_number(
    saved_at_2: Any, num_ranks: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    path, expected = saved_at_2[dtype]
    for found in run_ranks(num_ranks, _load, str(path), dtype, options):
        worlds.assert_equal(found, expected)
        assert found.keys() == expected.keys()


def _resume(folder: str, dtype: torch.dtype) -> None:
    net = worlds.make(dtype)
    opt = worlds.wrap(net)
    worlds.train(net, opt, 0, STEPS)
    freehold.save(os.path.join(folder, "middle"), net, opt)
    worlds.train(net, opt, STEPS, STEPS + 2)
    uninterrupted = worlds.everything(net, opt)
    opt.close()
    other = worlds.make(dtype, seed=100 + dist.get_rank())
    opt = worlds.wrap(other, bucket_numel=123, policy="packed")
    freehold.load(freehold.latest(folder), other, opt)
    statistics = {n: b for n, b in net.state_dict().items() if "running" in n or "num_batches" in n}
    for name, buffer in other.named_buffers():
        buffer.copy_(statistics[name])  # each rank's own, and no part of what a step computes in training
    worlds.train(other, opt, STEPS, STEPS + 2)
    found = worlds.everything(other, opt)
    worlds.assert_equal({k: v for k, v in found.items() if "running" not in k and "num_b" not in k}, uninterrupted)
    opt.close()


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [
        (1, torch.bfloat16),
        (2, torch.bfloat16),
        (3, torch.float32),
        pytest.param(4, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(7, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_b03_two_more_steps_equal_an_uninterrupted_run(num_ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    run_ranks(num_ranks, _resume, str(tmp_path), dtype)


def test_what_was_saved_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """The same state saved at 2 and at 3 ranks is the same checkpoint, but for who wrote which chunk."""
    path = str(tmp_path / "a")
    run_ranks(2, _save_plain, path)
    run_ranks(3, _copy, str(tmp_path / "a"), str(tmp_path / "b"))
    run_ranks(1, _copy, str(tmp_path / "b"), str(tmp_path / "c"))
    one, two, three = (read_manifest(tmp_path / name) for name in "abc")
    for other in (two, three):
        assert {k: (t.dtype, t.shape) for k, t in other.tensors.items()} == {
            k: (t.dtype, t.shape) for k, t in one.tensors.items()
        }
        assert (other.params, other.tied, other.groups) == (one.params, one.tied, one.groups)


def _save_plain(path: str) -> None:
    _save(path, torch.bfloat16, "save", with_extra=False)


def _copy(source: str, target: str) -> None:
    net = worlds.make(torch.bfloat16)
    opt = worlds.wrap(net, bucket_numel=200)
    freehold.load(source, net, opt)
    freehold.save(target, net, opt)
    opt.close()
