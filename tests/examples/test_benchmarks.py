"""The benchmarks run as the docs say, and report on every system."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_bench_step_reports_every_system(tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    command = [sys.executable, str(BENCHMARKS / "bench_step.py"), "--quick", "--rounds=1", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| DDP \+ torch.optim.Muon \|.*\| 1\.00 \|$", done.stdout, flags=re.MULTILINE), done.stdout
    record = json.loads(output.read_text())
    measured = {(sample["system"], sample["what"]) for sample in record["samples"]}
    systems, parts = ("ddp-adamw", "ddp-muon", "zero-muon", "freehold"), ("step", "backward", "optimizer")
    assert measured == {(system, part) for system in systems for part in parts}
    for rank in record["ranks"]:
        state = {system: held["state"] for system, held in rank["held_bytes"].items()}
        assert state["freehold"] < 0.6 * state["ddp-muon"]  # half, and a little padding


@pytest.mark.slow
def test_bench_collectives_prints_a_row_for_each_size() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_collectives.py"), "--rounds=2", "--mib", "0.25", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\| (?:0\.25|1) \|(?: \d+\.\d+ \|){7}$", done.stdout, flags=re.MULTILINE)) == 2, done.stdout
