"""The training example, started as a user starts it, and the parts that its ``--check`` rests on."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "train_gpt.py"
TINY = [
    "--steps=3",
    "--width=32",
    "--layers=1",
    "--heads=2",
    "--seq-len=32",
    "--batch-size=2",
    "--valid-batches=2",
    "--warmup=1",
    "--device=cpu",
]
BITS_PER_BYTE = re.compile(r"^validation +(\d+\.\d+) bits per byte after 3 steps$", flags=re.MULTILINE)


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The example on two ranks; a hang is an error after three minutes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",  # torch's own, of which a user sees none in its output either
    }
    return subprocess.run(
        [*command, *TINY, *arguments], env=environment, capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.parametrize("optimizer", ["ddp-muon", "ddp-adamw"])
def test_references_train_and_end_cleanly(optimizer: str) -> None:
    done = torchrun("--optimizer", optimizer)
    assert done.returncode == 0, done.stderr
    found = BITS_PER_BYTE.search(done.stdout)
    assert found, done.stdout
    assert 2.0 < float(found[1]) < 9.0  # untrained it is 8, that of 256 equally likely bytes


def test_freehold_equals_ddp_muon_bit_for_bit(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "layout.html"
    done = torchrun("--check", "--accumulate", "2", "--picture", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{picture} (open it in a browser)" in done.stdout
    assert "blocks.0.attention" in picture.read_text(encoding="utf-8")
    assert "check passed: 3 losses of each of 2 ranks, freehold against ddp-muon, are bit-equal" in done.stdout
    assert BITS_PER_BYTE.search(done.stdout), done.stdout
    shares = re.search(r"^Newton-Schulz work +(.*) by rank$", done.stdout, flags=re.MULTILINE)
    assert shares, done.stdout
    assert shares[1] == "50.0% 50.0%"  # six matrices of one block divide evenly


def test_bfloat16_with_clipping_is_within_the_stated_tolerance() -> None:
    done = torchrun("--check", "--dtype", "bfloat16", "--clip", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed" in done.stdout
    assert re.search(r"^fp32 masters +\d", done.stdout, flags=re.MULTILINE), done.stdout


@pytest.fixture
def train_gpt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example as a module of this process, as a single rank."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    num_threads = torch.get_num_threads()
    import train_gpt

    yield train_gpt
    torch.set_num_threads(num_threads)


def test_check_fails_when_freehold_computes_something_else(
    train_gpt: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true_build = train_gpt.build_system

    def build_wrong(name: str, model: Any, options: Any) -> Any:
        system = true_build(name, model, options)
        if name == "freehold":
            system.optimizers[0].param_groups[0]["lr"] *= 1.001
        return system

    monkeypatch.setattr(train_gpt, "build_system", build_wrong)
    assert train_gpt.main([*TINY, "--check"]) == 1
    assert "check FAILED: 3 losses of each of 1 ranks" in capsys.readouterr().out


def test_check_of_the_first_steps_passes_on_one_rank(train_gpt: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*TINY, "--check", "2", "--tied-head", "--fused-qkv"]) == 0
    assert "check passed: 2 losses of each of 1 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "--optimizer", "ddp-adamw"], "--check compares freehold with ddp-muon"),
        (["--check", "7"], "there are only 3 steps"),
        (["--steps", "0"], "must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(
    train_gpt: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_gpt.main([*TINY, *arguments])
    assert message in capsys.readouterr().err


def test_schedule_warms_up_and_ends_at_a_tenth(train_gpt: Any) -> None:
    schedule = train_gpt._WarmupCosine(warmup=4, steps=104)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(4) == pytest.approx(1.0)
    assert schedule(54) == pytest.approx(0.55)
    assert schedule(104) == pytest.approx(0.1)
