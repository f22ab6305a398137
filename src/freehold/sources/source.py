"""What every source gives: named params, ready for the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace

from freehold.errors import SourceError
from freehold.plan.machine import element_bytes
from freehold.plan.spec import ParamSpec

__all__ = ["ListedParam", "ModelSource", "normal_dtype"]

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedParam:
    """A param of which only this is known, as in a file's header.

    Attributes:
        name: The qualified name.
        shape: Sizes of its dimensions; checked where it is routed.
        dtype: Name of the element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Params in model order, and where they came from.

    Attributes:
        name: What to call it in a report.
        params: The params, with their rules.
        notes: What a reader should know: tensors that were left out, guesses.
        experts_per_token: How many matrices of a stack a token passes, if the source says so.

    Example:
        >>> source = ModelSource(name="toy", params=(ParamSpec(name="w", shape=(8, 8)),))
        >>> source.with_dtype("fp32").params[0].dtype
        'float32'
    """

    name: str
    params: tuple[ParamSpec, ...]
    notes: tuple[str, ...] = ()
    experts_per_token: int | None = None

    def with_dtype(self, dtype: str) -> ModelSource:
        """The same params in another element type.

        Raises:
            SourceError: The type is unknown.
        """
        name = normal_dtype(dtype)
        return replace(self, params=tuple(replace(spec, dtype=name) for spec in self.params))

    def matrices(self) -> ModelSource:
        """The params that are updated as matrices, alone.

        Raises:
            SourceError: There are none.
        """
        kept = tuple(spec for spec in self.params if spec.rule == "matrix")
        if not kept:
            raise SourceError(f"{self.name}: none of its {len(self.params)} params is a matrix")
        dropped = len(self.params) - len(kept)
        notes = (f"Matrices alone: {dropped} elementwise params are left out.",) if dropped else ()
        return replace(self, params=kept, notes=(*self.notes, *notes))


def normal_dtype(dtype: str) -> str:
    """The name that torch has for an element type; short names are understood.

    Example:
        >>> normal_dtype("bf16"), normal_dtype("torch.float32")
        ('bfloat16', 'float32')

    Raises:
        SourceError: The type is unknown.
    """
    name = dtype.strip().lower().removeprefix("torch.")
    name = _SHORT_DTYPES.get(name, name)
    try:
        element_bytes(name)
    except ValueError:
        known = "bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2"
        raise SourceError(f"dtype must be {known}, got {dtype!r}") from None
    return name
