"""A bucket and the slots that it is cut into."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

__all__ = ["Bucket", "Mode", "Slot"]

Mode = Literal["whole", "flat"]
"""``whole``: shard edges fall between granules. ``flat``: they may fall at any element."""

_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One contiguous piece of one param on one rank.

    Attributes:
        name: The param.
        rank: The group rank that holds it.
        offset: Where it begins, in elements from the start of that rank's shard.
        start: First element of the flattened param.
        stop: One past its last element.

    Example:
        >>> Slot(name="w", rank=1, offset=64, start=0, stop=100).numel
        100
    """

    name: str
    rank: int
    offset: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one collective carries: ``num_ranks`` shards of ``shard_numel`` elements.

    Attributes:
        index: Position in ``Layout.buckets``; also the order in which gradients are reduced.
        mode: ``"whole"`` or ``"flat"``.
        dtype: Element type of all its params.
        num_ranks: Number of shards.
        start: Its first element, counted over all buckets of the layout.
        shard_numel: Elements of one shard, padding included.
        slots: Sorted by address, that is by ``(rank, offset)``.

    Example:
        >>> slot = Slot(name="w", rank=1, offset=0, start=0, stop=100)
        >>> bucket = Bucket(
        ...     index=0, mode="whole", dtype="float32", num_ranks=2, start=0, shard_numel=128, slots=(slot,)
        ... )
        >>> bucket.numel, bucket.real_numel, bucket.slots_of_rank(0)
        (256, 100, ())
    """

    index: int
    mode: Mode
    dtype: str
    num_ranks: int
    start: int
    shard_numel: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.num_ranks * self.shard_numel

    @property
    def real_numel(self) -> int:
        """Elements that belong to params."""
        return sum(slot.stop - slot.start for slot in self.slots)

    @property
    def stop(self) -> int:
        """One past its last element, counted over all buckets of the layout."""
        return self.start + self.numel

    def slots_of_rank(self, rank: int) -> tuple[Slot, ...]:
        """The slots in the shard of ``rank``, by offset."""
        first = bisect_left(self.slots, rank, key=_RANK)
        return self.slots[first : bisect_left(self.slots, rank + 1, key=_RANK)]
