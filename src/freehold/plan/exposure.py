"""How much communication cannot hide behind compute: a small model, in whole numbers.

One channel sends buckets one at a time in the order in which they become ready. Backward takes time in proportion to
the elements whose gradients it produces, and sending takes time in proportion to the elements that are sent, padding
included (see ``BACKWARD_PER_SEND``). What is still being sent when backward
ends is *exposed*. Times are counted in the time that it takes to send one element.

``exposed_numel`` knows one speed of the link and looks at backward alone: that is the figure of the tables, and what
padding is traded against. Many results tie in it. ``waiting_numel`` tells them apart: it is the whole step of
``timeline``, gathers included, without latency and summed over several speeds of the link, because a policy does not
know the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["BACKWARD_PER_SEND", "ReadyBucket", "exposed_numel", "waiting_numel"]

BACKWARD_PER_SEND = 2
"""Backward time per element over sending time per element: sending everything takes half a backward pass."""

_LINK_SPEEDS = (1, 2, 4, 8)
"""Backward time over the time to send all gradients, in quarters: from a link that governs the step to a fast one."""


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


def waiting_numel(buckets: Iterable[ReadyBucket], real_numel: int) -> int:
    """Time in which ranks wait for the link, in both directions, summed over links of several speeds.

    Forward takes half the time of backward, and gathering an element (16 bits) half of reducing it (32). Gathers run
    in reverse order; forward reads a bucket first at its latest param, where ``real_numel - ready_numel`` elements lie
    behind it.

    Args:
        buckets: In any order.
        real_numel: Elements of all params.

    Returns:
        A whole number without a unit, for comparison between results on the same params.

    Example:
        >>> early = [ReadyBucket(ready_numel=50, numel=50), ReadyBucket(ready_numel=100, numel=50)]
        >>> late = [ReadyBucket(ready_numel=90, numel=50), ReadyBucket(ready_numel=100, numel=50)]
        >>> waiting_numel(early, 100) < waiting_numel(late, 100)
        True
    """
    ordered = sorted(buckets, key=lambda bucket: bucket.ready_numel)
    waiting = 0
    for speed in _LINK_SPEEDS:  # in eighths of the time to send one element: reduce 8, gather 4, forward ``speed``
        free = 0
        for bucket in ordered:
            free = max(free, 2 * speed * bucket.ready_numel) + 8 * bucket.numel
        waiting += max(0, free - 2 * speed * real_numel)
        arrived = wait = 0
        for bucket in reversed(ordered):
            arrived += 4 * bucket.numel
            wait = max(wait, arrived - speed * (real_numel - bucket.ready_numel))
        waiting += wait
    return waiting
