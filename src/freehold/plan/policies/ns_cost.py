"""``ns_cost``: Megatron-LM's PR 6379, which packs by Newton-Schulz work within a limit on padding."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right

from freehold.plan.policies._greedy import absorb_runs, isolated_bucket
from freehold.plan.problem import Item, PackedBucket, Placement, Problem, align_up

__all__ = ["TOLERANCE", "ns_cost_policy"]

TOLERANCE = 0.3
"""A shard may grow to ``1 + TOLERANCE`` times the mean shard in favour of balance (Megatron-LM PR 6379)."""

_Entry = tuple[float, int]  # a cost, an exact int, and its rank
_NOBODY: _Entry = (math.inf, -1)


def ns_cost_policy(problem: Problem) -> tuple[PackedBucket, ...]:
    """Membership as ``absorb``; most expensive first, each onto the rank of least cost so far that has room.

    The cost of a rank is carried over from bucket to bucket. A rank has room while its shard stays within 1.3
    times the mean; if none has, the shard whose end is lowest takes the param.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> params = [ParamSpec(name="a", shape=(64, 64)), ParamSpec(name="b", shape=(8, 512))]
        >>> layout = plan(params, num_ranks=2, policy="ns_cost")
        >>> layout.owner("a"), layout.owner("b")
        (0, 1)
    """
    costs = [0] * problem.num_ranks
    buckets: list[PackedBucket] = []
    for run in absorb_runs(problem):
        if run[0].isolated:
            buckets.append(isolated_bucket(problem, run[0]))
        else:
            buckets.append(_pack_by_cost(problem, run, costs))
    return tuple(buckets)


def _pack_by_cost(problem: Problem, run: list[Item], costs: list[int]) -> PackedBucket:
    shards = _Shards(problem, run, costs)
    placements: list[Placement] = []
    for item in sorted(run, key=lambda item: -item.cost):
        rank = shards.cheapest_with_room(item.numel)
        if rank is None:
            rank = shards.lowest()
        placements.append(Placement(index=item.index, rank=rank, offset=shards.put(rank, item)))
    return PackedBucket(placements=tuple(placements), shard_numel=align_up(max(shards.ends), problem.shard_unit))


class _Shards:
    """The shards of an open bucket, and a fast answer to: which is the cheapest with room for this size?

    A plain scan asks every rank for every param. Here ranks are kept by class, the number of the run's
    distinct sizes (in ascending order) that they still have room for. Each class is a heap of ``(cost,
    rank)``, and a segment tree over the classes holds the least entry of each: ranks with room for a size are
    those from some class on, so one query of the tree names the cheapest. A placement moves one rank to
    another class; the entry that it leaves behind is dropped when it comes to the top of its heap.
    """

    def __init__(self, problem: Problem, run: list[Item], costs: list[int]) -> None:
        self.ends = [0] * problem.num_ranks
        self._costs = costs
        self._alignment = problem.alignment
        self._sizes = sorted({item.numel for item in run})
        # Floating point, in this order: whether a shard is just within the limit depends on it.
        self._limit = sum(item.numel for item in run) / problem.num_ranks * (1 + TOLERANCE)
        self._by_end = [(0, rank) for rank in range(problem.num_ranks)]
        first = self._class_of(0)
        self._classes = [first] * problem.num_ranks
        self._num_classes = len(self._sizes) + 1
        self._heaps: list[list[_Entry]] = [[] for _ in range(self._num_classes)]
        self._heaps[first] = [(cost, rank) for rank, cost in enumerate(costs)]
        heapq.heapify(self._heaps[first])
        self._tree: list[_Entry] = [_NOBODY] * (2 * self._num_classes)
        self._refresh(first)

    def cheapest_with_room(self, numel: int) -> int | None:
        """The rank of least cost whose shard stays within the limit with ``numel`` more elements."""
        low = self._num_classes + bisect_left(self._sizes, numel) + 1
        high = 2 * self._num_classes
        best = _NOBODY
        while low < high:
            if low & 1:
                best = min(best, self._tree[low])
                low += 1
            if high & 1:
                high -= 1
                best = min(best, self._tree[high])
            low >>= 1
            high >>= 1
        return None if best is _NOBODY else best[1]

    def lowest(self) -> int:
        """The rank whose shard ends lowest."""
        while self._by_end[0][0] != self.ends[self._by_end[0][1]]:
            rank = self._by_end[0][1]
            heapq.heapreplace(self._by_end, (self.ends[rank], rank))
        return self._by_end[0][1]

    def put(self, rank: int, item: Item) -> int:
        """Put an item onto a rank's shard; returns its offset."""
        offset = align_up(self.ends[rank], self._alignment)
        self.ends[rank] = offset + item.numel
        self._costs[rank] += item.cost
        before, after = self._classes[rank], self._class_of(self.ends[rank])
        self._classes[rank] = after
        heapq.heappush(self._heaps[after], (self._costs[rank], rank))
        self._refresh(before)
        self._refresh(after)
        return offset

    def _class_of(self, end: int) -> int:
        start = align_up(end, self._alignment)
        return bisect_right(self._sizes, self._limit, key=lambda size: start + size)

    def _refresh(self, index: int) -> None:
        heap = self._heaps[index]
        while heap and (self._classes[heap[0][1]] != index or self._costs[heap[0][1]] != heap[0][0]):
            heapq.heappop(heap)
        node = self._num_classes + index
        self._tree[node] = heap[0] if heap else _NOBODY
        while node > 1:
            node >>= 1
            self._tree[node] = min(self._tree[2 * node], self._tree[2 * node + 1])
