"""The command line as a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import freehold

SRC = Path(freehold.__file__).parents[1]
DATA = Path(__file__).parents[1] / "data"
LLAMA = str(DATA / "zoo" / "llama-3-8b.json.gz")


def run(*command: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        env={**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_plan_as_a_process() -> None:
    done = run("-m", "freehold", "plan", LLAMA, "--ranks", "16", "--policy", "absorb", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["report"]["padding_fraction"] < 0.2


def test_bad_input_as_a_process_is_one_line_and_status_2() -> None:
    done = run("-m", "freehold", "plan", "nosuch.json", "--ranks", "16")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "freehold: no such file: 'nosuch.json' (and it is no list of shapes such as 128x2688x1856)\n"


def test_lists_and_shapes_need_no_torch() -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = ['freehold', 'compare', {LLAMA!r}, '--ranks', '8', '--policies', 'absorb']\n"
        "from freehold.__main__ import main\n"
        "main()\n"
    )
    done = run("-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "absorb" in done.stdout


def test_png_without_pillow_is_refused_in_one_line(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['PIL'] = None\n"
        f"sys.argv = ['freehold', 'draw', '8x64x64', '--ranks', '2', '-o', {str(tmp_path / 'a.png')!r}]\n"
        "from freehold.__main__ import main\n"
        "main()\n"
    )
    done = run("-c", script)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("freehold: PNG needs Pillow: pip install 'freehold[report]'")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_there_is_one_clear_line(missing: str) -> None:
    script = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "sys.argv = ['freehold', '--help']\n"
        "from freehold.__main__ import main\n"
        "main()\n"
    )
    done = run("-c", script)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"freehold: the command line needs {missing}, which is not installed: pip install 'freehold[report]'\n"
    )


def test_without_transformers_a_config_is_refused_in_one_line() -> None:
    script = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        f"sys.argv = ['freehold', 'plan', {str(DATA / 'qwen3-30b-a3b' / 'config.json')!r}, '--ranks', '8']\n"
        "from freehold.__main__ import main\n"
        "main()\n"
    )
    done = run("-c", script)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("freehold: this source needs transformers: pip install 'freehold[torch,models]'")


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "freehold", "plan", LLAMA, "--ranks", "64", "--policy", "absorb"]
    process = subprocess.Popen(
        [*command, "--format", "json"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=120)
    assert errors == b""


@pytest.mark.slow
def test_a_public_config_as_a_new_user_would_type_it() -> None:
    done = run("-m", "freehold", "plan", str(DATA / "qwen3-30b-a3b" / "config.json"), "--ranks", "64", timeout_s=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Qwen3MoeForCausalLM (qwen3-30b-a3b)\n531 params on 64 ranks, policy packed, ")
