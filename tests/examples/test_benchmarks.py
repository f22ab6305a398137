"""The benchmarks run as the docs say, report on every system, and count as they claim."""

import doctest
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
# What torch.distributed.optim does when it is imported.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
SYSTEMS = {"ddp-adamw", "ddp-muon", "zero-muon", "muon-fsdp2", "freehold", "freehold-auto"}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.parametrize("name", ["moe", "bf16_products", "step_memory"])
def test_benchmark_docstring_examples_run(load: Any, name: str) -> None:
    result = doctest.testmod(load(name))
    assert result.attempted
    assert not result.failed


def test_experts_as_stacks_compute_what_separate_ones_do(load: Any) -> None:
    gpt, moe = load("gpt"), load("moe")
    sizes = gpt.GPTConfig(vocab_size=17, width=32, num_layers=1, num_heads=2)
    models = []
    for stacked in (False, True):
        torch.manual_seed(0)
        models.append(moe.moe_gpt(sizes, moe.ExpertsConfig(num_experts=5, ffn_width=24, stacked=stacked)))
    tokens = torch.randint(17, (2, 12))
    separate, stacks = (model(tokens) for model in models)
    torch.testing.assert_close(stacks, separate)
    for logits in (separate, stacks):
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    experts = models[0].blocks[0].mlp.experts
    torch.testing.assert_close(models[1].blocks[0].mlp.up.grad, torch.stack([e.up.weight.grad for e in experts]))
    torch.testing.assert_close(models[1].blocks[0].mlp.down.grad, torch.stack([e.down.weight.grad for e in experts]))


def test_a_token_goes_through_its_best_experts_weighted_by_their_scores(load: Any) -> None:
    moe = load("moe")
    torch.manual_seed(0)
    layer = moe.MixtureOfExperts(8, moe.ExpertsConfig(num_experts=4, ffn_width=6, top_k=2)).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    found = layer(x)
    for token, got in zip(x[0], found[0], strict=True):
        scores = layer.router(token).float().softmax(-1)
        best = sorted(range(4), key=lambda e: -scores[e].item())[:2]
        torch.testing.assert_close(got, sum(scores[e].double() * layer.experts[e](token) for e in best))


@pytest.mark.parametrize("stacked", [False, True])
def test_an_expert_without_tokens_has_a_gradient_of_zeros(load: Any, stacked: bool) -> None:
    moe = load("moe")
    layer = moe.MixtureOfExperts(8, moe.ExpertsConfig(num_experts=6, ffn_width=4, top_k=1, stacked=stacked))
    layer(torch.ones(1, 3, 8)).sum().backward()  # three equal tokens: one expert
    grads = [layer.up.grad] if stacked else [expert.up.weight.grad.unsqueeze(0) for expert in layer.experts]
    used = torch.cat(grads).flatten(1).abs().amax(1) > 0
    assert used.sum() == 1
    assert all(param.grad is not None for param in layer.parameters())


def record(samples: list[tuple[str, int, str, float]], **changes: Any) -> dict[str, Any]:
    """A record of two ranks, as ``step_worker.py`` writes it."""
    names = {name for name, *_ in samples}
    held = {name: {"weights": 2**20, "gradients": 2**20, "masters": 0, "state": 2**21} for name in names}
    rank = {"held_bytes": held, "started_s": dict.fromkeys(names, 1.25), "peak_growth_bytes": 10 * 2**20}
    columns = ("system", "round", "what", "seconds")
    rows = [dict(zip(columns, sample, strict=True)) for sample in samples]
    return {"samples": rows, "ranks": [rank, rank], "unavailable": {}} | changes


def test_ratios_are_taken_within_a_round(load: Any) -> None:
    # The machine slows down tenfold in the second round; within a round freehold takes half the time, then a quarter.
    times = {"ddp-adamw": (1.0, 10.0), "ddp-muon": (2.0, 20.0), "freehold": (1.0, 5.0)}
    samples = [(name, i, "step", seconds) for name, both in times.items() for i, seconds in enumerate(both)]
    lines = list(load("step_tables").time_table(record(samples)))
    row = next(line for line in lines if line.startswith("| freehold"))
    assert row.split(" | ")[1:4] == ["3000 (1000 to 5000)", "0.75", "0.38"]
    assert row.split(" | ")[4:7] == ["-", "-", "-"]  # no sample of the optimizer
    assert row.endswith("| 1.2 | 4 |")


def test_a_system_that_cannot_run_is_named_with_the_reason(load: Any) -> None:
    measured = record([("ddp-muon", 0, "step", 1.0)], unavailable={"muon-fsdp2": "no compiler"})
    assert list(load("step_tables").time_table(measured))[-1] == "\nNot measured: FSDP2 + muon-fsdp2: no compiler."


def test_memory_is_compared_with_the_reference_less_the_saved_state(load: Any) -> None:
    records = {name: record([(name, 0, "step", 1.0)]) for name in ("ddp-muon", "freehold")}
    for rank in records["freehold"]["ranks"]:
        rank["held_bytes"]["freehold"]["state"] = 2**20  # 1 MiB saved, so 9 MiB expected of 10
        rank["peak_growth_bytes"] = 12 * 2**20
    row = list(load("step_tables").memory_table(records))[-1]
    assert row.split(" | ")[1:] == ["1", "1", "0", "1", "12", "9", "1.33 |"]


def test_a_peer_without_its_package_or_a_compiler_is_unavailable(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = load("step_systems")
    assert systems.why_unavailable("freehold", float32_products=True) is None
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in systems.why_unavailable("muon-fsdp2", float32_products=False)
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: object())
    assert "compiled code" in systems.why_unavailable("muon-fsdp2", float32_products=True)
    monkeypatch.setattr(systems.shutil, "which", lambda name: None)
    assert "C++ compiler" in systems.why_unavailable("muon-fsdp2", float32_products=False)
    monkeypatch.setattr(systems.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert systems.why_unavailable("muon-fsdp2", float32_products=False) is None


def test_systems_are_measured_by_default_where_they_say_something(load: Any) -> None:
    systems = load("step_systems")
    assert set(systems.default_systems(torch.float32, memory=False)) == SYSTEMS
    assert set(systems.default_systems(torch.float32, memory=True)) == SYSTEMS | {"freehold-sharded"}
    assert set(systems.default_systems(torch.bfloat16, memory=False)) == SYSTEMS | {"freehold-bfloat16-sums"}
    assert set(systems.default_systems(torch.bfloat16, memory=True)) == set(systems.SYSTEM_NAMES)


def test_docs_have_room_for_the_table_of_every_case(load: Any, tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks.md"
    copy.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    replace = load("markdown_blocks").replace_block
    for case in load("step_models").CASES:
        replace(copy, f"bench_step {case}", ["| a table |"])
        assert f"<!-- bench_step {case}: begin -->\n| a table |\n<!-- bench_step {case}: end -->" in copy.read_text()
    with pytest.raises(SystemExit, match="must hold '<!-- bench_step nothing: begin -->'"):
        replace(copy, "bench_step nothing", [])


@pytest.mark.slow
def test_bench_step_reports_every_system(tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    command = [sys.executable, str(BENCHMARKS / "bench_step.py"), "--quick", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for case, record in json.loads(output.read_text()).items():
        in_bfloat16 = {"freehold-bfloat16-sums"} if case.endswith("bfloat16") else set[str]()
        systems = (SYSTEMS | in_bfloat16) - record["unavailable"].keys()
        assert record["unavailable"].keys() <= {"muon-fsdp2"}
        measured = {(sample["system"], sample["what"]) for sample in record["samples"]}
        assert measured == {(system, part) for system in systems for part in ("step", "backward", "optimizer")}
        for rank in record["ranks"]:
            assert rank["started_s"].keys() == systems
    state = [rank["held_bytes"] for rank in json.loads(output.read_text())["gpt-float32"]["ranks"]]
    for held in state:
        assert held["freehold"]["state"] < 0.6 * held["ddp-muon"]["state"]  # half, and a little padding
    assert len(re.findall(r"^\| DDP \+ torch.optim.Muon \|.*\| 1\.00 \|", done.stdout, flags=re.MULTILINE)) == 2


@pytest.mark.slow
def test_bench_step_measures_peak_memory(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_step.py"), "gpt-float32", "--quick", "--memory"]
    command += ["--systems", "ddp-muon", "freehold", "-o", str(tmp_path / "memory.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| DDP \+ torch.optim.Muon \|.*\| 1\.00 \|$", done.stdout, flags=re.MULTILINE), done.stdout
    for name, record in json.loads((tmp_path / "memory.json").read_text())["gpt-float32"].items():
        for rank in record["ranks"]:
            assert rank["peak_growth_bytes"] > sum(rank["held_bytes"][name].values())


@pytest.mark.slow
def test_bench_collectives_prints_a_row_for_each_size() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_collectives.py"), "--rounds=2", "--mib", "0.25", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\| (?:0\.25|1) \|(?: \d+\.\d+ \|){7}$", done.stdout, flags=re.MULTILINE)) == 2, done.stdout
