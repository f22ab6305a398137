"""The figures of a report, against independent counts and against the runtime's own prediction of memory."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from rich.console import Console

from freehold.plan import Layout, ParamSpec, plan, policy_names
from freehold.plan.machine import element_bytes
from freehold.report import (
    Finding,
    compare,
    comparison_to_json,
    findings_to_json,
    measure,
    planned,
    render_comparison,
    render_findings,
    render_table,
    to_json,
)
from freehold.runtime.describe import predict_memory
from freehold.sources import load_source
from strategies import Case, cases

ZOO = Path(__file__).parents[1] / "data" / "zoo"
BASELINES = ("threshold", "absorb", "ns_cost")


def text_of(renderable: object, width: int = 80) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(renderable)
    return file.getvalue()


def test_figures_of_three_matrices_counted_by_hand() -> None:
    """Two ranks, three 64 x 64 and a norm: 3 x 4096 need 2 + 1, so a shard of 8192; the norm is cut in two."""
    params = [ParamSpec(name=f"w{index}", shape=(64, 64)) for index in range(3)]
    params.append(ParamSpec(name="norm", shape=(256,), rule="elementwise"))
    report = measure(plan(params, num_ranks=2, policy="absorb"), plan_s=0.5)
    assert report.real_numel == 3 * 4096 + 256
    assert report.buffer_numel == 2 * 8192 + 256
    assert report.lower_bound_numel == report.buffer_numel
    assert report.padding_numel == 4096
    assert report.padding_fraction == 4096 / (3 * 4096 + 256)
    assert report.makespan == report.makespan_lower_bound == 2 * 5 * 6 * 64**3
    assert (report.num_buckets, report.largest_bucket_numel, report.num_params) == (2, 16384, 4)
    assert report.bytes_per_rank.params == 2 * report.buffer_numel
    assert report.bytes_per_rank.grads == 4 * report.buffer_numel
    # The dearest rank: two matrices with master and momentum, half a norm with master and two moments, fp32 each.
    assert report.bytes_per_rank.state == 8192 * 8 + 128 * 12
    assert report.plan_s == 0.5


@settings(max_examples=15)  # the bounds take most of the time
@given(cases(max_params=25, max_ranks=9))
def test_no_layout_is_below_its_bounds_and_memory_is_what_the_runtime_expects(case: Case) -> None:
    itemsizes = {"bfloat16": 2, "float32": 4}
    for policy in BASELINES:
        layout = case.plan(policy)
        report = measure(layout, plan_s=0.0)
        assert report.real_numel <= report.lower_bound_numel <= report.buffer_numel
        assert report.makespan_lower_bound <= report.makespan
        ranks = [
            predict_memory(layout, rank, state_fields={"whole": 1, "flat": 2}, itemsizes=itemsizes)
            for rank in range(layout.num_ranks)
        ]
        assert report.bytes_per_rank.params == ranks[0].param_bytes
        assert report.bytes_per_rank.grads == ranks[0].grad_bytes
        assert report.bytes_per_rank.state == max(rank.master_bytes + rank.state_bytes for rank in ranks)


@settings(max_examples=15)  # the bounds take most of the time
@given(cases(max_params=25, max_ranks=9))
def test_the_bound_of_elementwise_params_is_reached_with_one_bucket(case: Case) -> None:
    flat = [
        ParamSpec(name=f"{index}", shape=(spec.numel,), rule="elementwise", isolated=spec.isolated)
        for index, spec in enumerate(case.params)
    ]
    report = planned(flat, num_ranks=case.num_ranks, bucket_numel=None, policy="absorb").report
    isolated = sum(spec.isolated for spec in flat)
    if isolated == 0:
        assert report.buffer_numel == report.lower_bound_numel
    assert report.makespan == report.makespan_lower_bound == 0


def test_a_bound_far_above_zero_names_the_param_and_says_what_would_help() -> None:
    source = load_source(str(ZOO / "llama-3-8b.json.gz"))
    report = planned(source.params, num_ranks=512, bucket_numel=None, policy="absorb").report
    padding, work = report.advice
    assert "At least 330.8% padding" in padding
    assert "(4096, 14336)" in padding
    assert "Use fewer ranks" in padding
    assert "model.layers.31.mlp.down_proj.weight" in padding
    assert "model.layers.31.mlp.down_proj.weight" in work
    assert planned(source.params, num_ranks=8, bucket_numel=None, policy="absorb").report.advice == ()


def test_json_holds_the_layout_and_the_figures() -> None:
    params = [ParamSpec(name=f"w{index}", shape=(64, 64)) for index in range(3)]
    made = planned(params, num_ranks=2, bucket_numel=None, policy="absorb")
    record = json.loads(to_json(made.layout, made.report, notes=["a note"]))
    assert Layout.from_json(json.dumps(record["layout"])) == made.layout
    assert set(record["report"]) == {
        "real_numel",
        "buffer_numel",
        "padding_numel",
        "padding_fraction",
        "lower_bound_numel",
        "makespan",
        "makespan_lower_bound",
        "num_buckets",
        "largest_bucket_numel",
        "bytes_per_rank",
        "plan_s",
    }
    assert set(record["report"]["bytes_per_rank"]) == {"params", "grads", "state"}
    assert record["report"]["buffer_numel"] == made.layout.numel
    assert record["notes"] == ["a note", *made.report.advice]


def test_the_table_shows_every_bound_and_fits_a_terminal() -> None:
    params = [ParamSpec(name=f"w{index}", shape=(64, 64)) for index in range(3)]
    report = planned(params, num_ranks=2, bucket_numel=None, policy="absorb").report
    text = text_of(render_table(report, title="toy", notes=("a note",)))
    lines = {line[:26].strip(): line[26:].split() for line in text.splitlines()}
    assert lines["elements of buffers"] == ["16,384", "16,384"]
    assert lines["padding / params"] == ["33.33%", "33.33%"]
    assert lines["makespan / bound"] == ["1.000", "1.000"]
    assert "a note" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_comparison_marks_the_least_padding_of_each_number_of_ranks() -> None:
    source = load_source(str(ZOO / "llama-3-8b.json.gz"))
    reports = list(
        compare(source.params, rank_counts=(8, 512), policies=BASELINES, bucket_numel=lambda ranks, policy: "default")
    )
    assert [(report.num_ranks, report.policy) for report in reports] == [(n, p) for n in (8, 512) for p in BASELINES]
    text = text_of(render_comparison(reports, title="llama"))
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(("8 ", "512 ")) and "%" in line]
    marked = [row for row in rows if row[3] == "*"]
    assert {row[0] for row in marked} >= {"8", "512"}
    least = {n: min(report.buffer_numel for report in reports if report.num_ranks == n) for n in (8, 512)}
    best = {(str(r.num_ranks), r.policy) for r in reports if r.buffer_numel == least[r.num_ranks]}
    assert {(row[0], row[1]) for row in marked} == best
    assert "512 ranks: Matrices of bfloat16: At least 330.8% padding" in " ".join(text.split())
    record = json.loads(comparison_to_json("llama", reports))
    assert [row["report"]["buffer_numel"] for row in record["results"]] == [report.buffer_numel for report in reports]


def test_findings_as_table_and_json() -> None:
    findings = [Finding(subject="planner", status="broken", detail="a [reason] in brackets")]
    assert "a [reason] in brackets" in text_of(render_findings(findings))
    assert json.loads(findings_to_json(findings)) == [
        {"subject": "planner", "status": "broken", "detail": "a [reason] in brackets"}
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_bytes_follow_the_dtype(dtype: str) -> None:
    layout = plan([ParamSpec(name="w", shape=(64, 64), dtype=dtype)], num_ranks=1, policy="absorb")
    held = measure(layout, plan_s=0.0).bytes_per_rank
    size = element_bytes(dtype)
    master = 4 if size < 4 else 0
    assert (held.params, held.grads, held.state) == (4096 * size, 4096 * max(4, size), 4096 * (master + max(4, size)))
    assert held.total == held.params + held.grads + held.state


def test_names_of_baselines_are_policies() -> None:
    assert set(BASELINES) <= set(policy_names())
