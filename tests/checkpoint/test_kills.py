"""Killed while saving, at any moment: no checkpoint is lost, no half one is taken for a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _rounds(folder: Path, first: int, num_rounds: int, timeout_s: float) -> None:
    script = Path(__file__).with_name("kill_harness.py")
    command = [sys.executable, str(script), str(folder), str(first), str(num_rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    acknowledged = [int(line.split()[2]) for line in done.stdout.splitlines()]
    assert min(acknowledged) > 0, done.stdout  # the kills came while saving, not before it


def test_12_seeded_kills_lose_nothing(tmp_path: Path) -> None:
    _rounds(tmp_path, 0, 12, 120)


@pytest.mark.slow
def test_200_seeded_kills_lose_nothing(tmp_path: Path) -> None:
    _rounds(tmp_path, 1000, 200, 1500)
