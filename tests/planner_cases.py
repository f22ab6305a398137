"""Problems for the planner: the zoo of public models, DeepSeek-V3 without stacks, and seeded random ones."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from freehold.plan import Item, PackedBucket, ParamSpec, Problem, param_cost
from freehold.plan.bounds import buffer_bound, makespan_bound
from freehold.plan.exposure import ReadyBucket, exposed_numel
from freehold.plan.problem import shard_unit

__all__ = [
    "SMALL_SIZES",
    "Figures",
    "fused_zoo",
    "measure",
    "model_zoo",
    "problem_of",
    "random_case",
    "small_case",
    "specs_of_shapes",
    "unstacked_deepseek",
    "zoo_bucket_numel",
]

ZOO = Path(__file__).parent / "data" / "zoo"

EMBEDDINGS = ("embed", "lm_head", "wte", "wpe")


def zoo_bucket_numel(num_ranks: int) -> int:
    return max(40_000_000, 1_000_000 * num_ranks)


def specs_of_shapes(shapes: Sequence[Sequence[int]]) -> list[ParamSpec]:
    return [ParamSpec(name=f"p{i}", shape=tuple(shape)) for i, shape in enumerate(shapes)]


@cache
def fused_zoo() -> dict[str, list[ParamSpec]]:
    """Matrices as Megatron-LM fuses them, in model order."""
    return {name: specs_of_shapes(shapes) for name, shapes in json.loads((ZOO / "fused.json").read_text()).items()}


@cache
def model_zoo() -> dict[str, list[ParamSpec]]:
    """Matrices and stacks of the Hugging Face models; embeddings, heads and vectors are left out."""
    models: dict[str, list[ParamSpec]] = {}
    for path in sorted(ZOO.glob("*.json.gz")):
        entries = json.loads(gzip.decompress(path.read_bytes()))
        models[path.name.removesuffix(".json.gz")] = [
            ParamSpec(name=name, shape=tuple(shape))
            for name, shape in entries
            if len(shape) >= 2 and not any(word in name for word in EMBEDDINGS)
        ]
    return models


@cache
def unstacked_deepseek() -> list[ParamSpec]:
    """DeepSeek-V3 with every expert on its own, gate and up apart: 45,090 matrices of 8 sizes."""
    shapes: list[tuple[int, ...]] = []
    for spec in model_zoo()["deepseek-v3"]:
        if len(spec.shape) == 2:
            shapes.append(spec.shape)
        elif "gate_up" in spec.name:
            shapes += [(spec.shape[1] // 2, spec.shape[2])] * (2 * spec.shape[0])
        else:
            shapes += [spec.shape[1:]] * spec.shape[0]
    return specs_of_shapes(shapes)


def problem_of(params: Sequence[ParamSpec], num_ranks: int, bucket_numel: int | None) -> Problem:
    """What ``plan`` would hand to a policy."""
    items = tuple(
        Item(
            index=index,
            numel=spec.numel,
            granule_numel=spec.granule,
            cost=param_cost(spec),
            isolated=spec.isolated,
            shape=spec.shape,
        )
        for index, spec in enumerate(reversed(params))
    )
    unit = shard_unit(num_ranks, 64, high_busbw=False)
    return Problem(items=items, num_ranks=num_ranks, bucket_numel=bucket_numel, alignment=64, shard_unit=unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a result is judged by; parts of the model unless it says otherwise."""

    padding: float
    bound: float
    makespan: float  # over its bound
    exposed: float
    num_buckets: int
    largest: float  # largest bucket over max(bucket_numel, ranks x largest granule, largest stack)


def rank_loads(problem: Problem, buckets: Sequence[PackedBucket]) -> list[int]:
    """Cost of every rank, granule by granule: slow, and independent of the policy's own count."""
    loads = [0] * problem.num_ranks
    for bucket in buckets:
        for placement in bucket.placements:
            item = problem.items[placement.index]
            count = item.numel // item.granule_numel
            start = placement.rank * bucket.shard_numel + placement.offset
            for granule in range(count):
                loads[(start + granule * item.granule_numel) // bucket.shard_numel] += item.cost // count
    return loads


def measure(problem: Problem, buckets: Sequence[PackedBucket]) -> Figures:
    bound = buffer_bound(problem)
    heads = [0]
    for item in problem.items:
        heads.append(heads[-1] + item.numel)
    ready = [
        ReadyBucket(
            ready_numel=heads[max(p.index for p in bucket.placements) + 1],
            numel=problem.num_ranks * bucket.shard_numel,
        )
        for bucket in buckets
    ]
    numel = sum(bucket.numel for bucket in ready)
    stacks = [item.numel for item in problem.items if item.granule_numel < item.numel]
    granule = max(item.granule_numel for item in problem.items)
    natural = max([problem.bucket_numel or bound.real_numel, problem.num_ranks * granule, *stacks])
    return Figures(
        padding=numel / bound.real_numel - 1,
        bound=bound.numel / bound.real_numel - 1,
        makespan=max(rank_loads(problem, buckets)) / makespan_bound(problem).cost,
        exposed=exposed_numel(ready, bound.real_numel) / bound.real_numel,
        num_buckets=len(buckets),
        largest=max(bucket.numel for bucket in ready) / natural,
    )


STYLES = ("uniform", "few", "many", "odd", "giant", "stacks", "ties", "mixed")


def random_case(seed: int) -> tuple[list[ParamSpec], int, int | None]:
    """Params, ranks and bucket_numel: 1 to 300 params on 1 to 512 ranks, in one of eight styles."""
    rng = random.Random(seed)
    style = rng.choice(STYLES)
    count = rng.choice([rng.randint(1, 12), rng.randint(1, 60), rng.randint(1, 300)])
    num_ranks = rng.choice([1, 2, 3, 4, 8, rng.randint(1, 33), rng.randint(1, 512)])
    few = [(8 * rng.randint(1, 40), 8 * rng.randint(1, 40)) for _ in range(rng.randint(1, 6))]
    params: list[ParamSpec] = []
    for i in range(count):
        shape = _random_shape(rng, style, few, first=i == 0)
        isolated = style == "mixed" and rng.random() < 0.03
        params.append(ParamSpec(name=f"p{i}", shape=shape, isolated=isolated))
    total = sum(spec.numel for spec in params)
    bucket_numel = rng.choice(
        [None, 1, max(1, total // rng.randint(1, 12)), max(1, total // rng.randint(2, 40)), rng.randint(1, total)]
    )
    return params, num_ranks, bucket_numel


def _random_shape(rng: random.Random, style: str, few: list[tuple[int, int]], *, first: bool) -> tuple[int, ...]:
    match style:
        case "uniform":
            return few[0]
        case "few":
            return rng.choice(few)
        case "many":
            return rng.randint(1, 300), 8 * rng.randint(1, 64)
        case "odd":
            return 2 * rng.randint(1, 100) + 1, 2 * rng.randint(1, 100) + 1
        case "giant":
            return (4096, 4096) if first else (8 * rng.randint(1, 40), 8 * rng.randint(1, 8))
        case "stacks":
            matrix = rng.choice(few)
            return (rng.randint(1, 40), *matrix) if rng.random() < 0.5 else matrix
        case "ties":
            return (64, 64) if rng.random() < 0.7 else (128, 64)
        case _:
            kind = rng.random()
            if kind < 0.3:
                return rng.randint(1, 12), rng.randint(1, 30), rng.randint(1, 30)
            return (rng.randint(1, 200), rng.randint(1, 200)) if kind < 0.6 else rng.choice(few)


SMALL_SIZES = 5


def small_case(seed: int) -> tuple[list[ParamSpec], int, int | None]:
    """Up to 60 params of up to 5 sizes on up to 16 ranks: small enough for a proof of the optimum."""
    rng = random.Random(seed)
    unit = rng.choice([64, 64 * 8, 64 * 63])
    wanted = rng.randint(1, SMALL_SIZES)
    ranges = ((1, 9), (1, 30), (5, 20))
    sizes = sorted({rng.randint(*rng.choice(ranges)) for _ in range(wanted)}, reverse=True)
    count, num_ranks = rng.randint(6, 60), rng.choice([2, 3, 4, 5, 8, 12, 16])
    params = specs_of_shapes([(rng.choice(sizes) * unit // 64, 64) for _ in range(count)])
    total = sum(spec.numel for spec in params)
    bucket_numel = rng.choice([None, max(1, total // rng.randint(2, 8)), max(1, total // rng.randint(2, 4))])
    assert math.gcd(*(spec.numel for spec in params)) % 64 == 0
    return params, num_ranks, bucket_numel
