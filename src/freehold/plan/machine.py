"""What the timeline knows of the hardware and of the work: rates, latency, tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from freehold.errors import PlanError, PlanTypeError

__all__ = ["Machine", "Workload", "element_bytes", "ring_s"]

_ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the ranks and the link between them can do.

    Attributes:
        link_bytes_per_s: What one rank sends and receives at once, in one direction.
        link_latency_s: Time of one hop of the ring beyond the transfer. The default is the mean of NCCL's own tuning
            constants over a ring through nodes of 8 ranks: 7 hops of NVLink (3.4 us) and one of the network (14 us),
            ``hwLatencies`` of ``src/graph/tuning.cc`` in https://github.com/NVIDIA/nccl.
        matmul_flops_per_s: What a rank reaches in forward and backward.
        newton_schulz_flops_per_s: What a rank reaches in Newton-Schulz; ``None`` means the same.

    ``math.inf`` switches a cost off.

    Raises:
        PlanError: A rate that is not positive, a latency that is negative or not finite.

    Example:
        >>> machine = Machine(link_bytes_per_s=50e9, matmul_flops_per_s=400e12)
        >>> machine.update_flops_per_s
        400000000000000.0
    """

    link_bytes_per_s: float
    matmul_flops_per_s: float
    link_latency_s: float = 4.7e-6
    newton_schulz_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_rate("link_bytes_per_s", self.link_bytes_per_s)
        _check_rate("matmul_flops_per_s", self.matmul_flops_per_s)
        if self.newton_schulz_flops_per_s is not None:
            _check_rate("newton_schulz_flops_per_s", self.newton_schulz_flops_per_s)
        _check_number("link_latency_s", self.link_latency_s)
        if not 0 <= self.link_latency_s < math.inf:
            raise PlanError(f"link_latency_s must be a time of at least 0 seconds, got {self.link_latency_s!r}")

    @property
    def update_flops_per_s(self) -> float:
        """The rate of Newton-Schulz, with its default filled in."""
        return self.matmul_flops_per_s if self.newton_schulz_flops_per_s is None else self.newton_schulz_flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a rank computes between two updates.

    Attributes:
        tokens_per_rank: Tokens of one forward and backward (of one micro-batch, with gradient accumulation).
        experts_per_token: How many of the E matrices of a stack ``(E, M, N)`` a token passes; ``None`` means all.
        lookups: Params that are read by index and cost no flops. ``None`` means the first param of the model, if it
            is elementwise and has two dimensions: the token embedding. What is tied to one (an output head)
            does cost flops.
        reduction_dtype: Element type in which gradients are reduced; float64 params are reduced in float64.
        newton_schulz_steps: Iterations of Newton-Schulz.

    Raises:
        PlanError: A number below 1, an unknown dtype.
        PlanTypeError: A number that is no int.

    Example:
        >>> Workload(tokens_per_rank=8192).experts_per_token is None
        True
    """

    tokens_per_rank: int
    experts_per_token: int | None = None
    lookups: frozenset[str] | None = None
    reduction_dtype: str = "float32"
    newton_schulz_steps: int = 5

    def __post_init__(self) -> None:
        _check_count("tokens_per_rank", self.tokens_per_rank)
        _check_count("newton_schulz_steps", self.newton_schulz_steps)
        if self.experts_per_token is not None:
            _check_count("experts_per_token", self.experts_per_token)
        element_bytes(self.reduction_dtype)


def element_bytes(dtype: str) -> int:
    """Bytes of an element.

    Example:
        >>> element_bytes("bfloat16")
        2
    """
    if dtype not in _ELEMENT_BYTES:
        raise PlanError(f"dtype must be one of {', '.join(_ELEMENT_BYTES)} for a timeline, got {dtype!r}")
    return _ELEMENT_BYTES[dtype]


def ring_s(num_bytes: int, num_ranks: int, machine: Machine) -> float:
    """Seconds of a reduce-scatter or an all-gather of ``num_bytes`` in all.

    Example:
        >>> ring_s(400, 4, Machine(link_bytes_per_s=100, link_latency_s=0.5, matmul_flops_per_s=1))
        4.5
    """
    hops = num_ranks - 1
    return hops * machine.link_latency_s + num_bytes * hops / num_ranks / machine.link_bytes_per_s


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanTypeError(f"{name} must be a number, got {value!r}")


def _check_rate(name: str, value: object) -> None:
    _check_number(name, value)
    if not isinstance(value, (int, float)) or not value > 0:
        raise PlanError(f"{name} must be a rate above 0 a second, got {value!r}")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int:
        raise PlanTypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise PlanError(f"{name} must be at least 1, got {value}")
