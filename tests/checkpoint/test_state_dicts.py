"""Plain state dicts, into freehold and out of it, as users of torch save and load them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
import worlds
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import freehold
from freehold.errors import CheckpointError


def _through_torch_save(value: Any) -> tuple[Any, int]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    size = buffer.tell()
    buffer.seek(0)
    return torch.load(buffer, weights_only=True), size


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_save_and_load_resume_bit_for_bit(order: str, dtype: torch.dtype) -> None:
    """In either order: masters are not rounded when the weights are loaded after them (nor before)."""
    net = worlds.make(dtype)
    opt = worlds.wrap(net)
    worlds.train(net, opt, 0, 3)
    (model_state, _), (state, _) = _through_torch_save(net.state_dict()), _through_torch_save(opt.state_dict())
    worlds.train(net, opt, 3, 5)
    expected = worlds.everything(net, opt)
    opt.close()
    other = worlds.make(dtype, seed=9)
    opt = worlds.wrap(other, bucket_numel=None, policy="threshold")
    calls = [lambda: other.load_state_dict(model_state), lambda: opt.load_state_dict(state)]
    for call in calls if order == "model first" else reversed(calls):
        call()
    worlds.train(other, opt, 3, 5)
    worlds.assert_equal(worlds.everything(other, opt), expected)
    opt.close()


def _save_state(path: str) -> None:
    net = worlds.make(torch.bfloat16)
    opt = worlds.wrap(net)
    worlds.train(net, opt, 0, 3)
    state = opt.state_dict()
    to_rank_0 = freehold.full_optim_state_dict(opt)
    assert (to_rank_0 is None) == (dist.get_rank() != 0)
    if to_rank_0 is not None:
        worlds.assert_equal(_flat(to_rank_0), _flat(state))
        torch.save({"opt": state, "model": freehold.full_state_dict(net, opt)}, path)
    opt.close()


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} {key}": value for name, fields in state["state"].items() for key, value in fields.items()}


def _load_state(path: str) -> None:
    both = torch.load(path, weights_only=True)
    net = worlds.make(torch.bfloat16, seed=50 + dist.get_rank())
    opt = worlds.wrap(net, policy="packed", bucket_numel=100)
    opt.load_state_dict(both["opt"])
    net.load_state_dict(both["model"])
    worlds.assert_equal(_flat(opt.state_dict()), _flat(both["opt"]))
    worlds.assert_equal({k: v for k, v in net.state_dict().items() if "running" not in k}, both["model"])
    opt.verify()
    opt.close()


def test_a_gathered_state_dict_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(2, _save_state, str(tmp_path / "both.pt"))
    run_ranks(3, _load_state, str(tmp_path / "both.pt"))


def _peak_of_gathering() -> tuple[int, int]:
    """Bytes of all tensors that are allocated while rank 0 gathers, beside the result, and those of a bucket."""
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    opt = cases.wrap(net, elementwise=None, bucket_numel=4 * 64 * 64)
    result = freehold.full_optim_state_dict(opt)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        again = freehold.full_optim_state_dict(opt)
    current = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    kept = (
        0 if again is None else sum(t.nbytes for f in again["state"].values() for t in f.values() if t is not f["step"])
    )
    bucket = max(bucket.bucket.numel for bucket in opt._buckets) * 4
    assert result is None or len(opt._buckets) == 4
    opt.close()
    return peak - kept, bucket


def test_gathering_takes_the_memory_of_one_bucket_beside_the_result() -> None:
    for beside, bucket in run_ranks(2, _peak_of_gathering):
        assert beside <= 1.25 * bucket, (beside, bucket)


def test_a_state_dict_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    net = nn.Linear(8, 8)
    opt = cases.wrap(net)
    state = opt.state_dict()
    state["state"]["weight"]["momentum_buffer"] = torch.ones(8, 9)
    state["state"]["bias"].pop("exp_avg")
    state["state"]["other"] = {"step": 1, "exp_avg": torch.ones(3)}
    state["param_groups"][0]["params"].append("other")
    before = cases.snapshot(opt)
    with pytest.raises(CheckpointError) as caught:
        opt.load_state_dict(state)
    for expected in ("expected shape (8, 8)", "'exp_avg' of param 'bias' is missing", "'optim.other.exp_avg'"):
        assert expected in str(caught.value)
    cases.assert_same(cases.snapshot(opt), before)
    opt.close()


def test_saving_weights_never_drags_the_flat_buffer_along(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    opt = cases.wrap(net, bucket_numel=None)
    real = sum(p.nbytes for p in net.parameters())
    full = freehold.full_state_dict(net, opt)
    loaded, size = _through_torch_save(full)
    assert size < real + 20_000
    one, size = _through_torch_save(full["0.weight"])
    assert size < 64 * 64 * 4 + 2_000
    assert torch.equal(one, net[0].weight)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    plain.load_state_dict(loaded)
    cases.assert_same(cases.weights(plain), cases.weights(net))
    save_file(net.state_dict(), tmp_path / "live.safetensors")  # views: the library writes each alone
    save_file(full, tmp_path / "full.safetensors")
    assert (tmp_path / "live.safetensors").stat().st_size < real + 5_000
    for name in ("live", "full"):
        found = load_file(tmp_path / f"{name}.safetensors")
        cases.assert_same({key: found[key] for key in full}, full)
        assert found.keys() == full.keys()
    opt.close()


@pytest.mark.parametrize("form", ["torch.save", "safetensors"])
def test_weights_of_a_plain_model_load_into_a_wrapped_one(form: str, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    wrapped = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    opt = cases.wrap(wrapped)
    if form == "torch.save":
        wrapped.load_state_dict(_through_torch_save(plain.state_dict())[0])
    else:
        save_file(plain.state_dict(), tmp_path / "plain.safetensors")
        wrapped.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    state = opt.state_dict()["state"]  # masters follow at once, so a save is right without a step in between
    for name, p in plain.named_parameters():
        assert torch.equal(state[name]["master"], p.float())
    freehold.save(tmp_path / "0", wrapped, opt)
    with torch.no_grad():
        wrapped[0].weight.zero_()
    freehold.load(tmp_path / "0", wrapped, opt)
    cases.assert_same(cases.weights(wrapped), cases.weights(plain))
    opt.close()


def test_dcp_itself_reads_a_checkpoint(tmp_path: Path) -> None:
    """Weights for another program: DCP's own planner, our reader, and nothing of freehold's runtime."""
    net, opt = worlds.saved(tmp_path / "2")
    wanted = {f"model.{name}": torch.zeros_like(p) for name, p in net.named_parameters()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, storage_reader=freehold.CheckpointReader(tmp_path / "2"), no_dist=True)
    for name, p in net.named_parameters():
        assert torch.equal(wanted[f"model.{name}"], p)
    opt.close()


def test_the_parts_are_safetensors(tmp_path: Path) -> None:
    net, opt = worlds.saved(tmp_path / "2")
    tensors = load_file(tmp_path / "2" / "part-00000.safetensors")
    assert torch.equal(tensors["model.embedding.weight"], net.embedding.weight)
    assert torch.equal(tensors["optim.up.momentum_buffer"], opt.state_dict()["state"]["up"]["momentum_buffer"])
    opt.close()
