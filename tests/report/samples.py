"""Layouts of public models to draw."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from freehold.plan import Layout, ParamSpec, plan

__all__ = ["layouts_of", "model"]

_ZOO = Path(__file__).parents[1] / "data" / "zoo"
_ELEMENTWISE = ("embed", "lm_head", "wte", "wpe")


def model(name: str) -> list[ParamSpec]:
    """The params of a model of the zoo, vectors and tables elementwise."""
    pairs = json.loads(gzip.decompress((_ZOO / f"{name}.json.gz").read_bytes()))
    return [
        ParamSpec(
            name=param,
            shape=tuple(shape),
            rule="elementwise" if len(shape) < 2 or any(part in param for part in _ELEMENTWISE) else "matrix",
        )
        for param, shape in pairs
    ]


def layouts_of(params: list[ParamSpec], num_ranks: int, *policies: str) -> list[Layout]:
    """One layout a policy."""
    return [plan(params, num_ranks=num_ranks, bucket_numel="default", policy=policy) for policy in policies]
