"""Options of the command line: name, meaning and limits of each, in one place for all commands."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from freehold.plan.policies import policy_names

__all__ = [
    "MAX_RANKS",
    "BucketNumel",
    "DrawnPolicies",
    "Dtype",
    "ExpertRanks",
    "Format",
    "LinkGbps",
    "MatricesOnly",
    "Output",
    "OutputFormat",
    "Picture",
    "PolicyName",
    "PolicyNames",
    "RankCounts",
    "Ranks",
    "Source",
    "Tflops",
    "Tokens",
]

MAX_RANKS = 1_000_000
"""More than there are accelerators; a planner of more would only fill memory."""

_TIMELINE = "Modelled step, for --bucket-numel auto and for pictures"


class Format(StrEnum):
    """How to print a result."""

    TABLE = "table"
    JSON = "json"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A Hugging Face config.json, a .safetensors file or its index.json, a folder with one of them, a JSON "
        "list [[name, shape], ...] (also .gz), or shapes: 128x2688x1856,4x1024x1024 (matrices of their own), "
        "stack:128x1536x2048 (one 3-D param).",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--ranks",
        "-n",
        metavar="N",
        min=1,
        max=MAX_RANKS,
        show_default=False,
        help="Ranks of the data-parallel group.",
    ),
]
RankCounts = Annotated[
    str, typer.Option("--ranks", "-n", metavar="N,N,...", show_default=False, help="Numbers of ranks.")
]
PolicyName = Annotated[str, typer.Option(metavar="NAME", help=f"How to plan: {', '.join(policy_names())}.")]
PolicyNames = Annotated[
    str | None, typer.Option(metavar="P,P,...", show_default="all", help=f"Of {', '.join(policy_names())}.")
]
BucketNumel = Annotated[
    str,
    typer.Option(
        metavar="N|none|auto|default",
        help="Least elements of a bucket: a number such as 64e6; none: one bucket; auto: the shortest modelled step; "
        "default: min(max(40e6, 1e6 x ranks), elements / 8).",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", show_default="as in the source, else bfloat16", help="Element type of all weights."),
]
MatricesOnly = Annotated[
    bool,
    typer.Option("--all-matrix", help="Plan the matrices alone: no embeddings, heads, norms and biases."),
]
ExpertRanks = Annotated[
    int | None,
    typer.Option(
        "--ep",
        min=1,
        metavar="N",
        show_default="all params",
        help="Plan the experts that one of N expert-parallel ranks holds.",
    ),
]
OutputFormat = Annotated[Format, typer.Option("--format", help="How to print the result.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default="standard output", help="Where to write it."),
]
Picture = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="Where to draw: a name that ends in .html, .svg or .png."),
]
DrawnPolicies = Annotated[
    str,
    typer.Option(metavar="P,P,...", help=f"Of {', '.join(policy_names())}; several are shown side by side."),
]
LinkGbps = Annotated[
    float,
    typer.Option(
        min=1e-3, rich_help_panel="Timeline, for --bucket-numel auto", help="Link of a rank, Gbit/s each way."
    ),
]
Tflops = Annotated[
    float,
    typer.Option(min=1e-3, rich_help_panel="Timeline, for --bucket-numel auto", help="What a rank reaches, Tflop/s."),
]
Tokens = Annotated[
    int,
    typer.Option(min=1, rich_help_panel="Timeline, for --bucket-numel auto", help="Tokens of a rank and micro-batch."),
]
