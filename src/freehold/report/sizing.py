"""What ``--bucket-numel`` means: a number, none, the default, or the size with which a modelled step is shortest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from freehold.errors import PlanError
from freehold.plan.auto import Candidate, bucket_numel_ladder, fastest, try_bucket_numels
from freehold.plan.machine import Machine, Workload
from freehold.plan.spec import ParamSpec

__all__ = ["Sized", "Sizing", "parse_bucket_numel"]

Watch = Callable[[Iterable[Candidate], int], Iterable[Candidate]]
"""Passes candidates on, and may show how many of how many have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A ``bucket_numel`` for ``plan``, and how it was found."""

    bucket_numel: int | str | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How to find ``bucket_numel``.

    Attributes:
        bucket_numel: As for ``plan``, or ``"auto"``.
        machine: What ``"auto"`` takes the ranks and the link for.
        workload: What it takes a step for.
    """

    bucket_numel: int | str | None
    machine: Machine
    workload: Workload

    def choose(self, params: Sequence[ParamSpec], *, num_ranks: int, policy: str, watch: Watch) -> Sized:
        """Settle on a size.

        Args:
            params: The params in model order.
            num_ranks: Ranks of the data-parallel group.
            policy: Name of the policy.
            watch: Shows progress of ``"auto"``, which plans a dozen layouts.

        Example:
            >>> machine = Machine(link_bytes_per_s=1e15, link_latency_s=1.0, matmul_flops_per_s=1e15)
            >>> sizing = Sizing(bucket_numel="auto", machine=machine, workload=Workload(tokens_per_rank=1))
            >>> params = [ParamSpec(name=f"layers.{i}", shape=(1024, 1024)) for i in range(64)]
            >>> sizing.choose(params, num_ranks=4, policy="absorb", watch=lambda tried, count: tried).bucket_numel
            67108864
        """
        if self.bucket_numel != "auto":
            return Sized(bucket_numel=self.bucket_numel)
        tried = try_bucket_numels(
            params, num_ranks=num_ranks, policy=policy, machine=self.machine, workload=self.workload
        )
        count = len(bucket_numel_ladder(sum(spec.numel for spec in params if spec.tied_to is None)))
        best = fastest(watch(tried, count))
        return Sized(bucket_numel=best.bucket_numel, notes=(_explained(best),))


def _explained(best: Candidate) -> str:
    step, exposed = best.timeline.step_s, best.timeline.exposed_comm_s
    return (
        f"auto: bucket_numel {best.bucket_numel:,} gives the shortest modelled step, {1e3 * step:.1f} ms, "
        f"{1e3 * exposed:.1f} ms of it exposed communication."
    )


def parse_bucket_numel(text: str) -> int | str | None:
    """``none``, ``default``, ``auto``, or a whole number such as ``64_000_000`` or ``64e6``.

    Raises:
        PlanError: It is something else.

    Example:
        >>> parse_bucket_numel("none"), parse_bucket_numel("auto"), parse_bucket_numel("64e6")
        (None, 'auto', 64000000)
    """
    word = text.strip().lower()
    if word == "none":
        return None
    if word in ("default", "auto"):
        return word
    try:
        number = int(word) if word.replace("_", "").isdigit() else float(word)
    except ValueError:
        number = 0
    if not 1 <= number < 2**63 or number != int(number):
        raise PlanError(f"--bucket-numel must be none, default, auto or a whole number of at least 1, got {text!r}")
    return int(number)
