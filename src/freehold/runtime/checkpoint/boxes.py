"""A run of a flattened tensor, as boxes of the tensor: checkpoints know shapes, shards know flat ranges.

A flat bucket may cut a param anywhere, and what lies between two cuts is no rectangle of the param in general. It is
a few of them: the end of a row, whole rows, the beginning of a row, and so on for each dim. Each of these boxes is a
contiguous run of the flattened tensor again, so reading and writing one copies plain memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Box", "boxes_of", "flat_start", "tiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor that is contiguous when the tensor is flattened.

    Attributes:
        offsets: Its first index in each dim.
        sizes: Its extent in each dim.
        start: Its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that elements ``start`` to ``stop`` of a flattened tensor consist of, in order.

    Args:
        shape: Of the tensor.
        start: First element of the flattened tensor.
        stop: One past the last.

    Example:
        >>> [(box.offsets, box.sizes) for box in boxes_of((3, 4), 2, 12)]
        [((0, 2), (1, 2)), ((1, 0), (2, 4))]
        >>> boxes_of((), 0, 1)
        (Box(offsets=(), sizes=(), start=0),)
    """
    if start >= stop:
        return ()
    if not shape:
        return (Box(offsets=(), sizes=(), start=0),)
    row_numel = math.prod(shape[1:])
    first, last = start // row_numel, (stop - 1) // row_numel
    if first == last and stop - start < row_numel:
        return _in_row(shape, first, start - first * row_numel, stop - first * row_numel)
    whole_from, whole_to = -(-start // row_numel), stop // row_numel
    head = _in_row(shape, first, start - first * row_numel, row_numel) if whole_from > first else ()
    tail = _in_row(shape, last, 0, stop - last * row_numel) if whole_to <= last else ()
    if whole_to <= whole_from:
        return (*head, *tail)
    zeros = (0,) * (len(shape) - 1)
    rows = Box(offsets=(whole_from, *zeros), sizes=(whole_to - whole_from, *shape[1:]), start=whole_from * row_numel)
    return (*head, rows, *tail)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> tuple[Box, ...]:
    before = row * math.prod(shape[1:])
    return tuple(
        Box(offsets=(row, *box.offsets), sizes=(1, *box.sizes), start=before + box.start)
        for box in boxes_of(shape[1:], start, stop)
    )


def flat_start(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Position in the flattened tensor of the element at ``offsets``.

    Example:
        >>> flat_start((3, 4), (1, 2))
        6
    """
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position


def tiles(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes, each ``(offsets, sizes)``, are contiguous runs that cover the tensor exactly once.

    A tensor without elements is covered by nothing, or by boxes without elements.

    Example:
        >>> tiles((3, 4), [((1, 0), (2, 4)), ((0, 0), (1, 4))]), tiles((3, 4), [((1, 0), (2, 4))])
        (True, False)
        >>> tiles((0,), []), tiles((0,), [((0,), (0,))])
        (True, True)
    """
    if math.prod(shape) == 0:
        return all(len(o) == len(s) == len(shape) and math.prod(s) == 0 for o, s in boxes)
    reached = 0
    inside = [(o, s) for o, s in boxes if len(o) == len(s) == len(shape)]
    for offsets, sizes in sorted(inside, key=lambda box: flat_start(shape, box[0])):
        if any(o < 0 or s < 1 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return False
        start = flat_start(shape, offsets)
        if start != reached or boxes_of(shape, start, start + math.prod(sizes)) != (
            Box(offsets=tuple(offsets), sizes=tuple(sizes), start=start),
        ):
            return False
        reached += math.prod(sizes)
    return reached == math.prod(shape)
