"""What a rule is: update maths on local tensors, with its state declared and no knowledge of ranks."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from freehold.errors import RuleError
from freehold.plan.spec import RuleKind

__all__ = ["Block", "Rule", "Span", "StateField"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateField:
    """A tensor of state that a rule keeps, of the span's dtype, zero at first.

    Attributes:
        name: Its key in ``Span.state`` and in checkpoints; that of ``torch.optim`` where there is one.
        per: ``"element"``: one value per param element. ``"row"``: one per row of each matrix, ``(M,)`` for a matrix
            and ``(E * M,)`` for ``E`` of a stack, block after block without alignment; for rules of kind ``"matrix"``
            only.

    Example:
        >>> StateField(name="momentum_buffer").per
        'element'
    """

    name: str
    per: Literal["element", "row"] = "element"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One param, or a part of one, inside a span.

    Attributes:
        offset: Where it begins, in elements from the start of the span; a multiple of 64.
        shape: ``(M, N)`` a matrix, ``(E, M, N)`` whole slices of a stack, ``(n,)`` elements.

    Example:
        >>> Block(offset=64, shape=(4, 8, 16)).shape
        (4, 8, 16)
    """

    offset: int
    shape: tuple[int, ...]

    @property
    def num_matrices(self) -> int:
        """``E`` of a stack, 1 of anything else.

        Example:
            >>> Block(offset=0, shape=(4, 8, 16)).num_matrices
            4
        """
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def num_rows(self) -> int:
        """Rows of all its matrices.

        Example:
            >>> Block(offset=0, shape=(4, 8, 16)).num_rows
            32
        """
        return self.num_matrices * self.shape[-2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A contiguous run of flat buffers, to be updated in one go.

    All tensors but state by rows are contiguous, of shape ``(n,)``; all are of one dtype, float32 or float64. Between
    blocks lie up to 63 elements of alignment padding, zero in every tensor, and zero they stay: a rule maps a zero
    param with a zero gradient and zero state to zeros.

    Attributes:
        param: ``(n,)`` the values (masters), updated in place.
        grad: ``(n,)`` the averaged gradient; scratch once the update is done.
        state: Tensors by the names of the rule's ``StateField``, updated in place: ``(n,)``, or one value per row of
            the span's matrices, in order.
        blocks: The params inside, by ascending offset.
        step: 1 for the first update of these params.
        per_matrix: A dict for each matrix of the span, in order (one for a block that is no matrix), kept from step to
            step and empty at first: tensors, ints, floats and bools by name. Only for rules that ``keeps_objects``.

    Example:
        >>> import torch
        >>> span = Span(
        ...     param=torch.ones(64), grad=torch.ones(64), state={"momentum_buffer": torch.zeros(64)},
        ...     blocks=(Block(offset=0, shape=(8, 8)),), step=1,
        ... )
        >>> span.param.numel()
        64
    """

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    blocks: tuple[Block, ...]
    step: int
    per_matrix: tuple[dict[str, Any], ...] = ()


class Rule(ABC):
    """How params are updated. A rule is a frozen dataclass whose fields are its options.

    To write one: subclass in a file of its own, decorate with ``@dataclass(frozen=True, slots=True)``, set
    ``kind``, call ``self.validate(self.defaults())`` in ``__post_init__``, and add a row to the conformance
    table, ``tests/rules/rule_cases.py``.

    The caller puts ``defaults()`` into a param group, where users and schedulers edit them; calls
    ``validate`` with the merged options; allocates ``state_fields``; and calls ``update`` once per step for
    every contiguous run of params that it owns. Nothing here communicates, and all that lasts between calls
    is ``Span.state`` and ``Span.per_matrix``.

    Attributes:
        kind: ``"matrix"`` if blocks must hold whole matrices, ``"elementwise"`` if params may be cut
            anywhere.
        keeps_objects: Whether ``update`` uses ``Span.per_matrix``.
    """

    __slots__ = ()

    kind: ClassVar[RuleKind]
    keeps_objects: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """What the rule is called in messages and checkpoints: by default, the name of its class."""
        return type(self).__name__

    def defaults(self) -> dict[str, Any]:
        """All options by name, as they go into a param group."""
        if not dataclasses.is_dataclass(self):
            raise TypeError(f"{type(self).__name__} must be a dataclass: its fields are its options")
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @abstractmethod
    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        """The state that ``update`` reads and writes under these options (by default, the rule's own)."""

    @abstractmethod
    def validate(self, options: Mapping[str, Any]) -> None:
        """Check a merged option set.

        Raises:
            RuleError: Naming every option that is missing or out of range, and its value.
        """

    def check_param(self, name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> None:
        """Check options against one param that they are meant for; nothing to check by default.

        Args:
            name: Its qualified name, for the message.
            shape: ``(M, N)`` of its matrices, or its own shape under an elementwise rule.
            options: Its merged options.

        Raises:
            RuleError: They do not fit.
        """
        return  # most rules take any shape

    @abstractmethod
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        """Update ``span.param`` and ``span.state`` in place.

        Args:
            span: The run of params; ``span.grad`` is overwritten.
            options: The live param group, so that edits take effect. ``lr`` is a float or a 1-element tensor;
                one that lies on an accelerator costs a device synchronisation per call.
        """


Check = tuple[str, Callable[[Any], bool], str]
"""An option's name, what must hold for its value, and the message (``{}`` stands for the value)."""


def check_options(rule: str, options: Mapping[str, Any], checks: Iterable[Check]) -> None:
    """Raise one ``RuleError`` that lists every check that fails.

    Example:
        >>> check_options("Muon", {"eps": -1.0}, [("eps", is_nonnegative, "eps should be >= 0 but is: {}")])
        Traceback (most recent call last):
        freehold.errors.RuleError: Muon: eps should be >= 0 but is: -1.0
    """
    problems: list[str] = []
    for name, holds, message in checks:
        if name not in options:
            problems.append(f"option {name!r} is missing")
        elif not _holds(holds, options[name]):
            problems.append(message.format(options[name]))
    if problems:
        raise RuleError(f"{rule}: " + "; ".join(problems))


def _holds(holds: Callable[[Any], bool], value: Any) -> bool:
    try:
        return holds(value)
    except (
        TypeError,
        RuntimeError,
    ):  # a value that cannot even be compared, such as a string or a large tensor
        return False


def is_nonnegative(value: Any) -> bool:
    """Whether a number, or a 1-element tensor, is at least 0 (NaN is not)."""
    return not isinstance(value, (bool, str)) and bool(value >= 0.0)


def host_scalar(value: float | Tensor) -> float | Tensor:
    """A hyperparameter for arithmetic on the host: a float, or a 0-d CPU tensor of the dtype it came in.

    A tensor stays a tensor, because ``torch.optim`` computes with it in its own precision, and so bits agree.

    Example:
        >>> host_scalar(0.5)
        0.5
    """
    return value.detach().cpu().squeeze() if isinstance(value, Tensor) else value
