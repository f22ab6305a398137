"""The examples of docs/cli.md: every command still works, and refuses what it is said to refuse, in those words."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freehold.cli import app

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```console\n\$ freehold (.*)\n(.*)\n", (ROOT / "docs" / "cli.md").read_text())


def cases() -> list[object]:
    """Models from a config.json import transformers, which takes 10 s."""
    return [
        pytest.param(*example, id=example[0], marks=[pytest.mark.slow] if "config.json" in example[0] else [])
        for example in EXAMPLES
    ]


def test_the_page_has_examples_of_every_command() -> None:
    assert {command.split()[0] for command, _ in EXAMPLES} == {"plan", "compare", "draw", "doctor"}


@pytest.mark.parametrize(("command", "first_line"), cases())
def test_an_example_of_the_page(command: str, first_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "80"})
    assert result.exit_code == (2 if first_line.startswith("freehold:") else 0), result.output
    assert result.output.splitlines()[0].rstrip() == first_line
