"""What the planner knows of a parameter: its name, its shape, and the smallest run of it that may not be cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from freehold.errors import PlanError, PlanTypeError

__all__ = ["ParamSpec", "RuleKind"]

RuleKind = Literal["matrix", "elementwise"]
"""How a param is updated: as whole matrices, or element by element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter, as a planner sees it.

    Attributes:
        name: The qualified name; unique within a plan.
        shape: Sizes of its dimensions, each at least 1. ``()`` is a scalar.
        dtype: Name of the element type as torch prints it without the prefix (``"bfloat16"``, ``"float32"``).
        rule: ``"matrix"`` if it is updated as whole matrices, ``"elementwise"`` if any element may go anywhere.
        granule_numel: The smallest run of elements that must stay on one rank. ``None`` means: the whole param for
            2-D params and for 4-D and more (seen as ``(out, rest)``), one slice ``(M, N)`` for 3-D stacks
            ``(E, M, N)``, and 1 for elementwise params. If given, it must divide the number of elements.
        isolated: The param gets a bucket of its own.
        tied_to: Name of the param that this one shares its memory with; a tied param gets no slot.

    Raises:
        PlanError: A size below 1, an unknown rule, a granule that does not divide the param, a matrix rule for fewer
            than two dimensions without an explicit granule.
        PlanTypeError: A shape that is not a tuple of ints, a name that is not a string.

    Example:
        >>> ParamSpec(name="blocks.0.experts", shape=(8, 64, 32)).granule
        2048
        >>> ParamSpec(name="norm.weight", shape=(64,), rule="elementwise").granule
        1
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    rule: RuleKind = "matrix"
    granule_numel: int | None = None
    isolated: bool = False
    tied_to: str | None = None

    def __post_init__(self) -> None:
        if type(self.name) is not str or not self.name:
            raise PlanTypeError(f"ParamSpec.name must be a non-empty string, got {self.name!r}")
        object.__setattr__(self, "shape", _checked_shape(self.name, self.shape))
        if self.rule not in ("matrix", "elementwise"):
            raise PlanError(f"param {self.name!r}: rule must be 'matrix' or 'elementwise', got {self.rule!r}")
        if self.granule_numel is None:
            if self.rule == "matrix" and len(self.shape) < 2:
                raise PlanError(
                    f"param {self.name!r}: shape {self.shape} has fewer than two dimensions and is no matrix; "
                    "use rule='elementwise', or give granule_numel to keep it whole"
                )
            return
        if type(self.granule_numel) is not int:
            raise PlanTypeError(f"param {self.name!r}: granule_numel must be an int, got {self.granule_numel!r}")
        if self.granule_numel < 1 or self.numel % self.granule_numel:
            raise PlanError(
                f"param {self.name!r}: granule_numel={self.granule_numel} must divide its {self.numel} elements"
            )

    @property
    def numel(self) -> int:
        """Number of elements, an exact Python int."""
        return math.prod(self.shape)

    @property
    def granule(self) -> int:
        """``granule_numel`` with its default filled in, in elements."""
        if self.granule_numel is not None:
            return self.granule_numel
        if self.rule == "elementwise":
            return 1
        if len(self.shape) == 3:
            return self.shape[1] * self.shape[2]
        return self.numel

    @property
    def num_granules(self) -> int:
        """How many granules the param consists of."""
        return self.numel // self.granule

    @property
    def mode(self) -> Literal["whole", "flat"]:
        """The kind of bucket it belongs in: ``flat`` if it may be cut at any element."""
        return "flat" if self.rule == "elementwise" and self.granule == 1 else "whole"

    @property
    def matrix_shape(self) -> tuple[int, int] | None:
        """``(M, N)`` of the matrix that one granule is, or ``None`` if a granule is no matrix."""
        if self.rule != "matrix" or len(self.shape) < 2:
            return None
        if len(self.shape) == 3:
            rows, cols = self.shape[1:]
            return (rows, cols) if self.granule == rows * cols and self.granule_numel != self.numel else None
        rows = self.shape[0]
        return (rows, self.numel // rows) if self.granule == self.numel else None


def _checked_shape(name: str, shape: object) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)):
        raise PlanTypeError(f"param {name!r}: shape must be a tuple of ints, got {shape!r}")
    sizes = cast("tuple[object, ...]", tuple(shape))  # pyright: ignore[reportUnknownArgumentType]
    checked = tuple(size for size in sizes if type(size) is int)
    if len(checked) != len(sizes):
        raise PlanTypeError(f"param {name!r}: shape must be a tuple of ints, got {shape!r}")
    if any(size < 1 for size in checked):
        raise PlanError(f"param {name!r}: every size of its shape must be at least 1, got {checked!r}")
    return checked
