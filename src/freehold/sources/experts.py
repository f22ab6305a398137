"""What one expert-parallel rank holds: its part of the experts, which train in a group of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from freehold.errors import SourceError
from freehold.plan.spec import ParamSpec
from freehold.sources.source import ModelSource

__all__ = ["experts_of_one_rank"]

_EXPERTS = re.compile(r"(?:^|\.)(?:local_)?experts(?:\.|$)")
_NUMBERED = re.compile(r"^(.*?(?:^|\.)(?:local_)?experts)\.(\d+)(?:\.|$)")


def experts_of_one_rank(source: ModelSource, num_expert_ranks: int) -> ModelSource:
    """The experts that the first of N expert-parallel ranks holds; everything else trains in another group.

    Experts are params with ``experts`` as a word of their path (``shared_experts`` are not among them), stacked in
    a first dimension or numbered; if no param is called so, all stacks ``(E, M, N)``.

    Args:
        source: The whole model.
        num_expert_ranks: N.

    Raises:
        SourceError: There are no experts, or N does not divide their number.

    Example:
        >>> stack = ParamSpec(name="mlp.experts.up_proj", shape=(128, 64, 32))
        >>> part = experts_of_one_rank(ModelSource(name="toy", params=(stack,)), 8)
        >>> part.params[0].shape
        (16, 64, 32)
    """
    if num_expert_ranks < 1:
        raise SourceError(f"--ep must be at least 1, got {num_expert_ranks}")
    experts = [spec for spec in source.params if _EXPERTS.search(spec.name)]
    if not experts:
        experts = [spec for spec in source.params if spec.rule == "matrix" and len(spec.shape) == 3]
    if not experts:
        raise SourceError(f"{source.name}: no experts found: no param has 'experts' in its path, and none is a stack")
    counts = _experts_by_prefix(experts)
    uneven = {count for count in counts.values() if count % num_expert_ranks}
    if uneven:
        raise SourceError(f"{source.name}: --ep {num_expert_ranks} does not divide its {min(uneven)} experts")
    parts = [_part(spec, counts, num_expert_ranks) for spec in experts]
    kept = tuple(spec for spec in parts if spec is not None)
    left_out = len(source.params) - len(experts)
    note = f"The experts of one of {num_expert_ranks} expert-parallel ranks"
    note += f"; {left_out} other params train in another group and are left out." if left_out else "."
    return replace(source, params=kept, notes=(*source.notes, note))


def _experts_by_prefix(experts: Iterable[ParamSpec]) -> dict[str, int]:
    """How many experts each numbered group, or each stacked param, has."""
    counts: dict[str, int] = {}
    for spec in experts:
        numbered = _NUMBERED.match(spec.name)
        if numbered is None:
            counts[spec.name] = spec.shape[0] if spec.shape else 1
        else:
            counts[numbered[1]] = max(counts.get(numbered[1], 0), int(numbered[2]) + 1)
    return counts


def _part(spec: ParamSpec, counts: dict[str, int], num_expert_ranks: int) -> ParamSpec | None:
    """A stack with its first experts alone; a numbered expert if it is one of the first; else nothing."""
    numbered = _NUMBERED.match(spec.name)
    if numbered is None:
        return replace(spec, shape=(spec.shape[0] // num_expert_ranks, *spec.shape[1:]))
    return spec if int(numbered[2]) < counts[numbered[1]] // num_expert_ranks else None
