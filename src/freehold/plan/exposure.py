"""How much communication cannot hide behind the backward pass: a small model, in whole numbers.

One channel sends buckets one at a time in the order in which they become ready. Backward takes time in proportion to
the elements whose gradients it produces, and sending takes time in proportion to the elements that are sent, padding
included (see ``BACKWARD_PER_SEND``). What is still being sent when backward
ends is *exposed*. Times are counted in the time that it takes to send one element.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["BACKWARD_PER_SEND", "ReadyBucket", "exposed_numel"]

BACKWARD_PER_SEND = 2
"""Backward time per element over sending time per element: sending everything takes half a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyBucket:
    """What the model knows of a bucket.

    Attributes:
        ready_numel: Real elements whose gradients exist once its last one exists, counted from the start of backward.
        numel: Elements to send, padding included.

    Example:
        >>> ReadyBucket(ready_numel=100, numel=128).numel
        128
    """

    ready_numel: int
    numel: int


def exposed_numel(buckets: Iterable[ReadyBucket], real_numel: int) -> int:
    """Time after the end of backward until the last bucket is sent, in elements sent.

    Args:
        buckets: In any order; they are sent in the order in which they become ready.
        real_numel: Elements of all params.

    Returns:
        ``real_numel`` if everything is sent, without padding, after backward has ended.

    Example:
        >>> exposed_numel([ReadyBucket(ready_numel=100, numel=100)], 100)
        100
        >>> halves = [ReadyBucket(ready_numel=50, numel=50), ReadyBucket(ready_numel=100, numel=50)]
        >>> exposed_numel(halves, 100)
        50
    """
    free = 0
    for bucket in sorted(buckets, key=lambda bucket: bucket.ready_numel):
        free = max(free, BACKWARD_PER_SEND * bucket.ready_numel) + bucket.numel
    return max(0, free - BACKWARD_PER_SEND * real_numel)
