"""Saving in the background, finding the newest, pruning, and what passes through ``extra``."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
import worlds
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

import freehold
from freehold.errors import CheckpointError
from freehold.runtime.checkpoint import saving
from freehold.runtime.checkpoint.boxes import boxes_of, tiles
from freehold.runtime.checkpoint.values import decode, encode


def test_latest_passes_over_everything_that_is_no_complete_checkpoint(tmp_path: Path) -> None:
    assert freehold.latest(tmp_path) is None
    assert freehold.latest(tmp_path / "missing") is None
    net, opt = worlds.saved(tmp_path / "b")
    freehold.save(tmp_path / "a", net, opt)
    assert freehold.latest(tmp_path) == tmp_path / "a"  # by time, not by name
    for name, damage in {
        "c": lambda path: (path / "manifest.json").unlink(),
        "d": lambda path: os.truncate(path / "part-00000.safetensors", 10),
        "e": lambda path: (path / "part-00000.safetensors").unlink(),
        "f": lambda path: (path / "manifest.json").write_text("{}"),
    }.items():
        shutil.copytree(tmp_path / "a", tmp_path / name)
        later = json.loads((tmp_path / name / "manifest.json").read_text())["body"]["created_ns"] + 10**18
        worlds.resign(tmp_path / name, lambda body, later=later: body.update(created_ns=later))
        assert freehold.latest(tmp_path) == tmp_path / name
        damage(tmp_path / name)
        assert freehold.latest(tmp_path) == tmp_path / "a"
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    (tmp_path / ".a.building-0123").mkdir()
    assert freehold.latest(tmp_path) == tmp_path / "a"
    opt.close()


def test_pruning_keeps_the_newest_and_touches_nothing_else(tmp_path: Path) -> None:
    net, opt = worlds.saved(tmp_path / "0")
    (tmp_path / "logs").mkdir()
    (tmp_path / ".3.building-00ff").mkdir()
    for step in range(1, 5):
        freehold.save(tmp_path / str(step), net, opt, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["3", "4", "logs"]
    freehold.load(tmp_path / "3", net, opt)
    opt.close()


def _async_many(root: str) -> None:
    net = worlds.make()
    opt = worlds.wrap(net)
    expected = {}
    for step in range(4):
        worlds.train(net, opt, step, step + 1)
        expected[step] = worlds.everything(net, opt)
        freehold.async_save(f"{root}/{step}", net, opt, extra=step, keep=3)
    last = freehold.async_save(f"{root}/last", net, opt, extra="last")
    assert last.wait() == last.wait() == Path(root, "last")
    assert last.done()
    for step in (2, 3):
        assert freehold.load(f"{root}/{step}", net, opt) == step
        found = worlds.everything(net, opt)
        if dist.get_rank() != 0:  # running statistics are now those of rank 0
            found = {key: value for key, value in found.items() if "running" not in key}
        worlds.assert_equal(found, expected[step])
    opt.close()


def test_async_saves_hold_the_moment_they_were_called_in(tmp_path: Path) -> None:
    run_ranks(2, _async_many, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2", "3", "last"]


def _completes_alone(root: str) -> bool:
    net = worlds.make()
    opt = worlds.wrap(net)
    handle = freehold.async_save(f"{root}/0", net, opt)
    deadline = time.monotonic() + 30
    while freehold.latest(root) is None and time.monotonic() < deadline:
        time.sleep(0.02)  # no call of freehold, no collective
    found = freehold.latest(root) == Path(root, "0")
    dist.barrier()
    handle.wait()
    opt.close()
    return found


def test_an_async_save_is_complete_without_a_further_call(tmp_path: Path) -> None:
    assert run_ranks(2, _completes_alone, str(tmp_path)) == [True, True]


def test_the_step_goes_on_while_a_slow_disk_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    write = saving.PartWriter.write_part

    def slow(writer: Any) -> Any:
        assert release.wait(60)
        return write(writer)

    monkeypatch.setattr(saving.PartWriter, "write_part", slow)
    net = worlds.make()
    opt = worlds.wrap(net)
    worlds.train(net, opt, 0, 1)
    expected = worlds.everything(net, opt)
    handle = freehold.async_save(tmp_path / "1", net, opt)
    worlds.train(net, opt, 1, 4)
    assert not handle.done()
    assert freehold.latest(tmp_path) is None
    release.set()
    freehold.load(handle.wait(), net, opt)
    worlds.assert_equal(worlds.everything(net, opt), expected)
    opt.close()


PROGRAM = """
import sys, torch, freehold
net = torch.nn.Linear(64, 64)
opt = freehold.LayerwiseOptimizer(net, matrix=freehold.Muon(), elementwise=freehold.AdamW())
freehold.async_save(sys.argv[1] + "/0", net, opt)
"""


def test_a_program_that_ends_finishes_its_async_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=120)
    assert freehold.latest(tmp_path) == tmp_path / "0"


def test_an_error_in_the_background_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    net = worlds.make()
    opt = worlds.wrap(net)
    handle = freehold.async_save(tmp_path / "0", net, opt)
    handle.wait()
    (tmp_path / "1").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        freehold.async_save(tmp_path / "1", net, opt)
    original = saving.publish
    try:
        saving.publish = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        handle = freehold.async_save(tmp_path / "2", net, opt)
        with pytest.raises(CheckpointError, match=r"completing .*2 failed: No space left on device"):
            freehold.save(tmp_path / "3", net, opt)
    finally:
        saving.publish = original
    with pytest.raises(CheckpointError, match="No space left"):
        handle.wait()
    freehold.save(tmp_path / "3", net, opt)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0", "1", "3"]
    opt.close()


def test_a_dropped_optimizer_is_not_kept_alive_by_its_saves(tmp_path: Path) -> None:
    _net, opt = worlds.saved(tmp_path / "0")
    opt.close()
    assert opt not in saving._pending


def test_random_and_scheduler_states_pass_through_extra(tmp_path: Path) -> None:
    net = nn.Linear(8, 8)
    opt = cases.wrap(net)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=20, cycle_momentum=False),
        torch.optim.lr_scheduler.MultiStepLR(opt, [3, 3, 5]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(opt),
    ]
    extra = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "empty": (),
        0.1: [float("nan"), -0.0, 1e-320, float("-inf"), 2**80, b"\x00\xff", None, True],
    }
    freehold.save(tmp_path / "0", net, opt, extra=extra)
    found = freehold.load(tmp_path / "0", net, opt)
    assert found["python"] == extra["python"]
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    assert torch.equal(found["torch"], extra["torch"])
    assert found["schedulers"] == extra["schedulers"]
    assert isinstance(found["schedulers"][1]["milestones"], collections.Counter)
    assert repr(found[0.1]) == repr(extra[0.1])
    for scheduler, state in zip(schedulers, found["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    opt.close()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_survive_json(value: Any) -> None:
    text = json.dumps(encode(value, {}, "extra"), allow_nan=False)
    assert repr(decode(json.loads(text), {})) == repr(value)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_tile_any_cut_of_any_shape(shape: list[int], data: st.DataObject) -> None:
    numel = int(np.prod(shape, dtype=int))
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel)))})
    runs = [boxes_of(shape, a, b) for a, b in itertools.pairwise(cuts)]
    boxes = [(box.offsets, box.sizes) for run in runs for box in run]
    assert tiles(shape, boxes)
    assert all(len(run) <= max(1, 2 * len(shape) - 1) for run in runs)
    reference = torch.arange(numel).view(shape)
    for box in (box for run in runs for box in run):
        index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert reference[index].flatten().tolist() == list(range(box.start, box.start + box.numel))
    if len(boxes) > 1:
        assert not tiles(shape, boxes[1:])
        assert not tiles(shape, [*boxes, boxes[0]])


def _slow_part(root: str) -> None:
    write = saving.PartWriter.write_part

    def slow(writer: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(4.0)
        return write(writer)

    net = worlds.make()
    opt = worlds.wrap(net, timeout_s=1.5)
    saving.PartWriter.write_part = slow
    try:
        freehold.save(f"{root}/0", net, opt)
    finally:
        saving.PartWriter.write_part = write
    freehold.load(f"{root}/0", net, opt)
    opt.close()


def test_a_save_may_take_longer_than_timeout_s(tmp_path: Path) -> None:
    run_ranks(2, _slow_part, str(tmp_path))


def _loses_a_rank(root: str) -> tuple[str, float] | None:
    """Rank 1 dies (as far as its peer can tell) while rank 0 waits for its part."""
    net = worlds.make()
    opt = worlds.wrap(net, timeout_s=2.0)
    handle = freehold.async_save(f"{root}/0", net, opt)
    if dist.get_rank() == 1:
        time.sleep(5.0)  # does not answer; the connection is closed by then
        return None
    begin = time.monotonic()
    error = cases.error_of(handle.wait)
    assert error is not None
    return error[0], time.monotonic() - begin


def test_a_rank_that_stops_answering_while_saving_is_an_error_in_time(tmp_path: Path) -> None:
    first, _ = run_ranks(2, _loses_a_rank, str(tmp_path))
    assert first[0] == "PeerError"
    assert first[1] < 2.0 + 5.0
    assert freehold.latest(tmp_path) in (None, tmp_path / "0")
