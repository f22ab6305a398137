"""The commands in this process: what they print, and what they refuse."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import freehold
from freehold.cli import app
from freehold.plan import Layout, policy_names
from freehold.report import doctor

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "tests" / "data" / "zoo"
LLAMA = str(ZOO / "llama-3-8b.json.gz")


def freehold_command(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})


def succeeds(*args: str) -> str:
    result = freehold_command(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_prints_what_was_reached_beside_the_bound() -> None:
    text = succeeds("plan", LLAMA, "--ranks", "16", "--policy", "absorb")
    assert text.startswith("llama-3-8b.json.gz\n291 params on 16 ranks, policy absorb, bucket_numel 40,000,000\n")
    assert re.search(r"elements of buffers +[\d,]+ +[\d,]+", text)
    assert re.search(r"makespan / bound +1\.\d+ +1\.000", text)


def test_plan_as_json_is_a_layout_that_can_be_read_back() -> None:
    record = json.loads(succeeds("plan", LLAMA, "--ranks", "16", "--policy", "absorb", "--format", "json"))
    layout = Layout.from_json(json.dumps(record["layout"]))
    assert (layout.num_ranks, layout.policy) == (16, "absorb")
    assert record["report"]["buffer_numel"] == layout.numel
    assert record["report"]["lower_bound_numel"] <= layout.numel


def test_plan_uses_the_packed_policy_and_the_default_size_unless_told_otherwise() -> None:
    layout = json.loads(succeeds("plan", "8x256x128", "--ranks", "4", "--format", "json"))["layout"]
    assert (layout["policy"], layout["bucket_numel"]) == ("packed", 8 * 256 * 128 // 8)


@pytest.mark.parametrize(
    ("text", "bucket_numel"), [("none", None), ("65536", 65536), ("64e3", 64000), ("65_536", 65536)]
)
def test_bucket_numel_as_typed(text: str, bucket_numel: int | None) -> None:
    out = succeeds(
        "plan", "8x256x128", "--ranks", "4", "--policy", "absorb", "--bucket-numel", text, "--format", "json"
    )
    assert json.loads(out)["layout"]["bucket_numel"] == bucket_numel


def test_bucket_numel_auto_follows_the_link() -> None:
    """A link so fast that only latency counts wants one bucket; a slow one wants to start early."""
    command = (
        "plan",
        "64x1024x1024",
        "--ranks",
        "4",
        "--policy",
        "absorb",
        "--bucket-numel",
        "auto",
        "--format",
        "json",
    )
    fast = json.loads(succeeds(*command, "--link-gbps", "1e9", "--tokens", "1", "--tflops", "1e6"))
    slow = json.loads(succeeds(*command, "--link-gbps", "100", "--tokens", "65536"))
    assert len(fast["layout"]["buckets"]) == 1
    assert len(slow["layout"]["buckets"]) > 4
    assert slow["notes"][0].startswith("auto: bucket_numel ")


def test_dtype_reaches_the_layout_and_the_bytes() -> None:
    command = ("plan", "8x256x128", "--ranks", "4", "--policy", "absorb", "--format", "json")
    half, full = (json.loads(succeeds(*command, "--dtype", dtype)) for dtype in ("bf16", "float32"))
    assert {param["dtype"] for param in full["layout"]["params"]} == {"float32"}
    assert full["report"]["bytes_per_rank"]["params"] == 2 * half["report"]["bytes_per_rank"]["params"]


def test_all_matrix_and_ep_narrow_the_model() -> None:
    qwen = str(ZOO / "qwen3-30b-a3b.json.gz")
    command = ("plan", qwen, "--ranks", "16", "--policy", "absorb", "--format", "json")
    matrices = json.loads(succeeds(*command, "--all-matrix"))
    assert {param["rule"] for param in matrices["layout"]["params"]} == {"matrix"}
    experts = json.loads(succeeds(*command, "--ep", "8"))
    assert len(experts["layout"]["params"]) == 96
    assert experts["report"]["real_numel"] == 48 * 16 * (1536 * 2048 + 2048 * 768)


def test_compare_has_a_line_for_every_number_of_ranks_and_policy() -> None:
    text = succeeds("compare", LLAMA, "--ranks", "8,64", "--policies", "threshold,absorb")
    rows = [line.split()[:2] for line in text.splitlines() if re.match(r" +\d+ +\w+.*%", line)]
    assert rows == [["8", "threshold"], ["8", "absorb"], ["64", "threshold"], ["64", "absorb"]]
    out = succeeds("compare", "8x64x64", "--ranks", "2, 4,2", "--format", "json")
    found = [(row["num_ranks"], row["policy"]) for row in json.loads(out)["results"]]
    assert found == [(ranks, policy) for ranks in (2, 4) for policy in policy_names()]


def test_output_goes_to_the_file_and_not_to_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "[red]layout.json"
    result = freehold_command("plan", "8x64x64", "--ranks", "2", "--format", "json", "-o", str(path))
    assert result.stdout == ""
    assert f"Wrote {path}" in result.stderr.replace("\n", "")
    assert json.loads(path.read_text())["report"]["padding_numel"] == 0


def test_doctor_finds_the_planner_sound() -> None:
    rows = {row["subject"]: row for row in json.loads(succeeds("doctor", "--format", "json"))}
    assert rows["planner"]["status"] == "ok"
    assert rows["freehold"]["detail"] == freehold.__version__
    assert rows["torch"]["status"] == "ok"
    assert "gloo" in rows["collectives"]["detail"]
    assert "planner" in succeeds("doctor")


def test_doctor_exits_with_1_if_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.0.1")
    result = freehold_command("doctor")
    assert result.exit_code == 1
    assert "is too old" in result.stdout


def test_doctor_knows_the_extras_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {
        (requirement, extra)
        for extra, packages in extras.items()
        if extra not in ("dev", "bench")
        for requirement in packages
    }
    known = {
        (f"{package.name}>={'.'.join(map(str, package.oldest))}", package.extra)
        for package in doctor._PACKAGES  # what doctor says must not go stale
    }
    assert {(text.removesuffix(".0"), extra) for text, extra in declared} == known


@pytest.mark.parametrize(
    ("name", "start"), [("page.html", b"<!doctype html>"), ("a.svg", b"<svg"), ("b.PNG", b"\x89PNG")]
)
def test_draw_writes_what_the_name_of_the_file_asks_for(tmp_path: Path, name: str, start: bytes) -> None:
    path = tmp_path / name
    result = freehold_command("draw", "8x256x128", "-n", "4", "--policy", "absorb,packed", "-o", str(path))
    assert (result.exit_code, result.stdout) == (0, "")
    data = path.read_bytes()
    assert data.startswith(start)
    if name != "b.PNG":
        assert all(word in data.decode() for word in ("absorb", "packed", "8x256x128", "400 Gbit/s"))


@pytest.mark.parametrize("command", [(), ("plan",), ("compare",), ("draw",), ("doctor",)])
def test_help_says_what_a_command_does(command: tuple[str, ...]) -> None:
    text = succeeds(*command, "--help")
    assert " ".join(["Usage: freehold", *command]) in text.replace("root", "freehold")
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_command_help_is_printed() -> None:
    assert succeeds() == succeeds("--help")
    assert succeeds("--version") == f"{freehold.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "nosuch.json", "--ranks", "2"), "no such file: 'nosuch.json'"),
        (("plan", "8x8", "--ranks", "0"), "'--ranks'"),
        (("plan", "8x8", "--ranks", "-3"), "'--ranks'"),
        (("plan", "8x8", "--ranks", "two"), "'--ranks'"),
        (("plan", "8x8", "--ranks", "1.5"), "'--ranks'"),
        (("plan", "8x8"), "Missing option '--ranks'"),
        (("plan", "--ranks", "2"), "Missing argument"),
        (("plan", "0x8", "--ranks", "2"), "every number must be at least 1, got 0"),
        (("plan", "8xa", "--ranks", "2"), "cannot read '8xa' as shapes"),
        (("plan", "8x8", "--ranks", "2", "--policy", "nosuch"), "no policy is called 'nosuch'; there are threshold"),
        (("plan", "8x8", "--ranks", "2", "--bucket-numel", "0"), "--bucket-numel must be none, default, auto or"),
        (("plan", "8x8", "--ranks", "2", "--bucket-numel", "nan"), "--bucket-numel must be"),
        (("plan", "8x8", "--ranks", "2", "--bucket-numel", "1.5"), "--bucket-numel must be"),
        (("plan", "8x8", "--ranks", "2", "--dtype", "int8"), "dtype must be bfloat16"),
        (("plan", "8x8", "--ranks", "2", "--format", "yaml"), "'--format'"),
        (("plan", "8x8", "--ranks", "2", "--ep", "2"), "no experts found"),
        (("plan", "8x8", "--ranks", "2", "--tflops", "nan", "--bucket-numel", "auto"), "tflops|matmul_flops_per_s"),
        (("plan", "8x8", "--ranks", "2", "--nosuch"), "No such option: --nosuch"),
        (("plan", "8x8", "--ranks", "2", "-o", "/nosuch/folder/file"), "/nosuch/folder/file: No such file"),
        (("compare", "8x8", "--ranks", "2,0"), "--ranks must be whole numbers from 1"),
        (("compare", "8x8", "--ranks", "²"), "--ranks must be whole numbers from 1"),
        (("compare", "8x8", "--ranks", ""), "--ranks must be whole numbers from 1"),
        (("compare", "8x8", "--ranks", "2", "--policies", "packed,nosuch"), "no policy is called 'nosuch'"),
        (("draw", "8x8", "--ranks", "2", "-o", "x.pdf"), "a file that ends in .html, .svg, .png; got 'x.pdf'"),
        (("draw", "8x8", "--ranks", "2", "-o", "/nosuch/x.svg"), "/nosuch/x.svg: No such file"),
        (("draw", "8x8", "--ranks", "2", "--policy", "nosuch"), "no policy is called 'nosuch'"),
        (("nosuch",), "No such command 'nosuch'"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(args: tuple[str, ...], message: str) -> None:
    result = freehold_command(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("freehold: ")
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([["w", [8, 0]]], "param 'w': every size of its shape must be at least 1"),
        ([["w", ["8", "8"]]], "param 'w': shape must be a tuple of ints"),
        ({"model_type": "nosuch"}, "unknown architecture 'nosuch'"),
        ({"hidden_size": 8}, "no model_type"),
    ],
)
def test_bad_files_are_one_clear_line_and_status_2(tmp_path: Path, entries: object, message: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(entries))
    result = freehold_command("plan", str(path), "--ranks", "2")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
