"""The command line: ``freehold plan | compare | draw | doctor``. Reads options, calls the rooms, prints."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from typer.core import TyperGroup

import freehold
from freehold.cli_options import (
    MAX_RANKS,
    BucketNumel,
    DrawnPolicies,
    Dtype,
    ExpertRanks,
    Format,
    LinkGbps,
    MatricesOnly,
    Output,
    OutputFormat,
    Picture,
    PolicyName,
    PolicyNames,
    RankCounts,
    Ranks,
    Source,
    Tflops,
    Tokens,
)
from freehold.errors import FreeholdError, PlanError
from freehold.plan.machine import Machine, Workload
from freehold.plan.policies import policy_names
from freehold.plan.timeline import simulate
from freehold.report.compare import PlannedReport, planned
from freehold.report.compare import compare as compared
from freehold.report.doctor import Finding, examine
from freehold.report.drawing import make_drawing
from freehold.report.picture import painter_for
from freehold.report.record import comparison_to_json, findings_to_json, to_json
from freehold.report.sizing import Sizing, parse_bucket_numel
from freehold.report.table import render_comparison, render_findings, render_table
from freehold.sources import ModelSource, experts_of_one_rank, load_source

__all__ = ["app", "main"]

T = TypeVar("T")

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's error for wrong options; it has no public name, and came from click before typer took click in."""

_STDERR = Console(stderr=True)


class _OneLineErrors(TyperGroup):
    """Prints whatever is wrong with the input in one line, and exits with status 2."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        extra["standalone_mode"] = False
        try:
            status = super().main(*args, **extra)
        except FreeholdError as error:
            _refuse(str(error))
        except OSError as error:
            _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except _USAGE_ERROR as error:
            # format_message adds the option's name; it is not part of Exception's interface
            _refuse(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
        sys.exit(status or 0)


def _refuse(message: str) -> NoReturn:
    print(f"freehold: {'; '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(2)


app = typer.Typer(cls=_OneLineErrors, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(freehold.__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan which rank owns which matrix, for optimizers that need whole matrices (Muon and its kin).

    Start with `freehold plan config.json --ranks 64`.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


# The options of a command are its parameters: that is how typer reads them, however many there are.


@app.command()
def plan(
    source: Source,
    ranks: Ranks,
    bucket_numel: BucketNumel = "default",
    policy: PolicyName = "packed",
    dtype: Dtype = None,
    all_matrix: MatricesOnly = False,
    ep: ExpertRanks = None,
    format: OutputFormat = Format.TABLE,
    output: Output = None,
    link_gbps: LinkGbps = 400.0,
    tflops: Tflops = 400.0,
    tokens: Tokens = 8192,
) -> None:
    """Lay out a model's params over the ranks, and report padding, balance and memory beside their lower bounds.

    `freehold plan config.json --ranks 64`

    `freehold plan 128x2688x1856,4x1024x1024 --ranks 32 --policy absorb --format json -o layout.json`
    """
    _refuse_unknown([policy])
    size = parse_bucket_numel(bucket_numel)
    model = _loaded(source, dtype=dtype, all_matrix=all_matrix, ep=ep)
    sizing = _sizing(size, model, link_gbps=link_gbps, tflops=tflops, tokens=tokens)
    sized = sizing.choose(model.params, num_ranks=ranks, policy=policy, watch=_watched)
    with _STDERR.status(f"Planning {len(model.params):,} params on {ranks:,} ranks"):
        made = planned(model.params, num_ranks=ranks, bucket_numel=sized.bucket_numel, policy=policy)
    notes = (*model.notes, *sized.notes)
    if format is Format.JSON:
        _write(to_json(made.layout, made.report, notes=notes), output)
    else:
        _write(render_table(made.report, title=model.name, notes=notes), output)


@app.command()
def compare(
    source: Source,
    ranks: RankCounts,
    policies: PolicyNames = None,
    bucket_numel: BucketNumel = "default",
    dtype: Dtype = None,
    all_matrix: MatricesOnly = False,
    ep: ExpertRanks = None,
    format: OutputFormat = Format.TABLE,
    output: Output = None,
    link_gbps: LinkGbps = 400.0,
    tflops: Tflops = 400.0,
    tokens: Tokens = 8192,
) -> None:
    """Put policies and numbers of ranks side by side.

    `freehold compare config.json --ranks 8,64,512`

    `freehold compare config.json --ranks 64 --policies packed,absorb --ep 8`
    """
    rank_counts, names = _rank_counts(ranks), _policy_list(policies)
    size = parse_bucket_numel(bucket_numel)
    model = _loaded(source, dtype=dtype, all_matrix=all_matrix, ep=ep)
    sizing = _sizing(size, model, link_gbps=link_gbps, tflops=tflops, tokens=tokens)
    runs = compared(
        model.params,
        rank_counts=rank_counts,
        policies=names,
        bucket_numel=lambda num_ranks, policy: (
            sizing.choose(model.params, num_ranks=num_ranks, policy=policy, watch=_unwatched).bucket_numel
        ),
    )
    reports = list(_watched(runs, len(rank_counts) * len(names)))
    if format is Format.JSON:
        _write(comparison_to_json(model.name, reports, notes=model.notes), output)
    else:
        _write(render_comparison(reports, title=model.name, notes=model.notes), output)


@app.command()
def draw(
    source: Source,
    ranks: Ranks,
    output: Picture = Path("layout.html"),
    policy: DrawnPolicies = "packed",
    bucket_numel: BucketNumel = "default",
    dtype: Dtype = None,
    all_matrix: MatricesOnly = False,
    ep: ExpertRanks = None,
    link_gbps: LinkGbps = 400.0,
    tflops: Tflops = 400.0,
    tokens: Tokens = 8192,
) -> None:
    """Draw buckets, owners and padding, and each rank's load, as a page to explore or as a static picture.

    `freehold draw config.json --ranks 64 -o layout.html`

    `freehold draw config.json --ranks 64 --policy absorb,packed -o layout.png`
    """
    paint, names = painter_for(output), _policy_list(policy)
    size = parse_bucket_numel(bucket_numel)
    model = _loaded(source, dtype=dtype, all_matrix=all_matrix, ep=ep)
    sizing = _sizing(size, model, link_gbps=link_gbps, tflops=tflops, tokens=tokens)
    made = list(_watched((_planned(model, sizing, ranks, name) for name in names), len(names)))
    with _STDERR.status(Text(f"Drawing {output}")):
        layouts = [one.layout for one in made]
        drawing = make_drawing(
            layouts,
            title=f"{model.name}; step at {link_gbps:g} Gbit/s, {tflops:g} Tflop/s, {tokens:,} tokens a rank",
            reports=[one.report for one in made],
            timelines=[simulate(layout, machine=sizing.machine, workload=sizing.workload) for layout in layouts],
        )
        output.write_bytes(paint(drawing))
    _STDERR.print(f"Wrote {output}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def doctor(format: OutputFormat = Format.TABLE, output: Output = None) -> None:
    """Say what is installed, what is missing and for what, and whether the planner works here.

    Exits with status 1 if something is broken; a missing optional package is not.
    """
    findings: list[Finding] = []
    with _STDERR.status("Looking around") as status:
        for finding in examine():
            findings.append(finding)
            status.update(f"Looked at {finding.subject}")
    _write(findings_to_json(findings) if format is Format.JSON else render_findings(findings), output)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def _loaded(source: str, *, dtype: str | None, all_matrix: bool, ep: int | None) -> ModelSource:
    with _STDERR.status(Text(f"Reading {source[:60]}")):
        model = load_source(source)
    if dtype is not None:
        model = model.with_dtype(dtype)
    if ep is not None:
        model = experts_of_one_rank(model, ep)
    return model.matrices() if all_matrix else model


def _planned(model: ModelSource, sizing: Sizing, ranks: int, policy: str) -> PlannedReport:
    sized = sizing.choose(model.params, num_ranks=ranks, policy=policy, watch=_unwatched)
    return planned(model.params, num_ranks=ranks, bucket_numel=sized.bucket_numel, policy=policy)


def _sizing(
    bucket_numel: int | str | None, model: ModelSource, *, link_gbps: float, tflops: float, tokens: int
) -> Sizing:
    return Sizing(
        bucket_numel=bucket_numel,
        machine=Machine(link_bytes_per_s=link_gbps * 1e9 / 8, matmul_flops_per_s=tflops * 1e12),
        workload=Workload(tokens_per_rank=tokens, experts_per_token=model.experts_per_token),
    )


def _rank_counts(text: str) -> tuple[int, ...]:
    counts: list[int] = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= MAX_RANKS:
            raise PlanError(f"--ranks must be whole numbers from 1 to {MAX_RANKS}, with commas between; got {text!r}")
        counts.append(int(part))
    return tuple(dict.fromkeys(counts))


def _policy_list(text: str | None) -> tuple[str, ...]:
    if text is None:
        return policy_names()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    _refuse_unknown(names)
    return names


def _refuse_unknown(policies: Iterable[str]) -> None:
    """Before the model is read, which takes its time."""
    for name in policies:
        if name not in policy_names():
            raise PlanError(f"no policy is called {name!r}; there are {', '.join(policy_names())}")


def _watched(items: Iterable[T], count: int) -> Iterable[T]:
    """Pass items on, with a bar on the terminal."""
    columns = (TextColumn("Planning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_STDERR, transient=True, disable=not _STDERR.is_terminal) as progress:
        yield from progress.track(items, total=count)


def _unwatched(items: Iterable[T], count: int) -> Iterable[T]:
    """Pass items on; a bar is on the terminal already."""
    del count
    return items


def _write(result: RenderableType, output: Path | None) -> None:
    """Text goes out as it is, so that JSON stays JSON; tables are laid out for the terminal or the file."""
    if output is None:
        _print(result, sys.stdout)
        return
    with output.open("w", encoding="utf-8") as file:
        _print(result, file)
    _STDERR.print(f"Wrote {output}", markup=False, highlight=False, soft_wrap=True)


def _print(result: RenderableType, file: Any) -> None:
    if isinstance(result, str):
        file.write(f"{result}\n")
    else:
        Console(file=file).print(result)
    file.flush()  # so that a closed pipe (| head) is noticed here, where typer ends quietly


def main() -> None:
    """Run the command line on ``sys.argv`` (``freehold.__main__`` does so, and says what is missing)."""
    app(prog_name="freehold")
