"""The training example goes on where a checkpoint left it, bit for bit, and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from test_train_gpt import torchrun

STEPS = ("--steps", "6", "--save-every", "3", "--dtype", "bfloat16", "--accumulate", "2")


def _body(path: Path) -> dict[str, object]:
    body = json.loads((path / "manifest.json").read_text())["body"]
    return {key: value for key, value in body.items() if key != "created_ns"}


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    done = torchrun(*STEPS, "--checkpoints", str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "whole" / "step-000003", tmp_path / "resumed" / "step-000003")
    again = torchrun(*STEPS, "--checkpoints", str(tmp_path / "resumed"), "--resume")
    assert again.returncode == 0, again.stderr
    assert "resumed after" in again.stdout
    # The checksums of all parts, the losses, schedules and random states: everything but the time of day.
    assert _body(tmp_path / "resumed" / "step-000006") == _body(tmp_path / "whole" / "step-000006")
