"""Lower bounds: what no layout of a problem can beat, and which param is to blame.

Both bounds argue about one rank at a time. Put the shards that a rank owns in all buckets on top of each other: the
pile is as tall as the sum of the buckets' shard sizes, the same for every rank, and it holds whole granules only. So
the sum of shard sizes is at least the height that one single bucket with ``num_ranks`` bins would need. How many
buckets there are, where they are cut and in which order they become ready does not matter: ``bucket_numel`` is a
minimum and never forces a second bucket. So a bound of the pile holds for every ``bucket_numel``; it binds where
``None`` or a large value leaves one bucket. Isolated params are the exception: each costs a bucket of its own, whose
size is known exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from freehold.plan.pattern_bound import pattern_bound
from freehold.plan.problem import Item, Problem, align_up

__all__ = ["BoundReason", "BoundTerm", "BufferBound", "MakespanBound", "buffer_bound", "makespan_bound"]

BoundReason = Literal["total", "unit", "largest", "pigeonhole", "floor", "pattern", "isolated"]
"""Which argument gives a bound; see :func:`buffer_bound` and :func:`makespan_bound`."""

_MAX_FLOOR_SIZES = 48
"""Distinct sizes that the floor argument tries as a divisor; its work grows with their square."""

_MAX_FLOOR_PARTS = 8
"""The floor argument tries each size divided by 1 up to this number."""

_MAX_PATTERN_SIZES = 12
"""Distinct sizes up to which the linear program over patterns is solved."""

_MAX_PIGEONHOLES = 4096
"""Multiples of ``num_ranks`` that the pigeonhole argument tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTerm:
    """One argument and what it proves.

    Attributes:
        reason: Which argument.
        value: The bound: elements of the summed shards of a rank, or cost of the dearest rank.
        item: A param that the argument rests on, ``None`` if it rests on all of them.

    Example:
        >>> BoundTerm(reason="total", value=64).item is None
        True
    """

    reason: BoundReason
    value: int
    item: Item | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferBound:
    """The least number of buffer elements that any layout of a problem can have.

    Attributes:
        numel: The bound, over all buckets and ranks.
        real_numel: Elements of the params themselves; the difference is padding that nobody can avoid.
        num_ranks: Ranks of the problem.
        active: The term that is the bound, of the buckets without isolated params.
        terms: Every argument, strongest first.
        isolated_numel: Buffer elements of the buckets of isolated params, exactly; included in ``numel``.
    """

    numel: int
    real_numel: int
    num_ranks: int
    active: BoundTerm
    terms: tuple[BoundTerm, ...]
    isolated_numel: int

    @property
    def padding_numel(self) -> int:
        """Elements of padding in any layout, at least."""
        return self.numel - self.real_numel

    def explain(self) -> str:
        """Say in one or two sentences which param causes the padding, and what would help against it.

        Example:
            >>> from freehold.plan.problem import Item, Problem
            >>> items = tuple(
            ...     Item(index=i, numel=n, granule_numel=n, cost=n, isolated=False, shape=(n // 64, 64))
            ...     for i, n in enumerate((640, 64, 64))
            ... )
            >>> bound = buffer_bound(
            ...     Problem(items=items, num_ranks=4, bucket_numel=None, alignment=64, shard_unit=64))
            >>> print(bound.explain())
            At least 233.3% padding: the largest matrix, shape (10, 64), needs a shard of 640 elements on each of 4 \
ranks, and all params together fill only 1 of them. Use fewer ranks or sub-groups of at most 1, or split that param.
        """
        percent = 100 * self.padding_numel / self.real_numel if self.real_numel else 0.0
        head = f"At least {percent:.1f}% padding"
        if self.padding_numel == 0:
            return "No padding is needed as far as the bounds can tell."
        return f"{head}: {_advice(self)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MakespanBound:
    """The least cost that the dearest rank can have; made by :func:`makespan_bound`.

    Attributes:
        cost: The bound.
        active: The term that is the bound.
        terms: Every argument, strongest first.

    Example:
        >>> term = BoundTerm(reason="total", value=7)
        >>> MakespanBound(cost=7, active=term, terms=(term,)).active.reason
        'total'
    """

    cost: int
    active: BoundTerm
    terms: tuple[BoundTerm, ...]


def _advice(bound: BufferBound) -> str:
    item, pile = bound.active.item, bound.active.value
    if item is None:
        return f"sizes are rounded up to shards of equal size on {bound.num_ranks} ranks. Use fewer ranks."
    useful = max(1, bound.real_numel // pile)
    shape = item.shape[1:] if len(item.shape) == 3 and item.granule_numel < item.numel else item.shape
    match bound.active.reason:
        case "largest":
            return (
                f"the largest matrix, shape {shape}, needs a shard of {pile:,} elements on each of {bound.num_ranks} "
                f"ranks, and all params together fill only {useful} of them. Use fewer ranks or sub-groups of at "
                f"most {useful}, or split that param."
            )
        case "pigeonhole":
            return (
                f"there are more matrices as large as shape {shape} than {bound.num_ranks} ranks can share evenly, so "
                f"that some rank holds {pile:,} elements. Use a number of ranks that divides them, fewer ranks, or "
                "split such a param."
            )
        case "floor":
            return (
                f"matrices of shape {shape} and larger fill a shard only in whole pieces, {pile:,} elements on some of "
                f"{bound.num_ranks} ranks. Use fewer ranks or sub-groups, or split such a param."
            )
        case _:
            return (
                f"every size is a multiple of the size of shape {shape} or of a common part of it, so that a rank's "
                f"share is rounded up to {pile:,} elements. Use a number of ranks that divides the total, or fewer."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Granules:
    """Granules of one size (or of one cost): the value, how many, and a param that they come from."""

    value: int
    count: int
    item: Item


def _grouped(values: Sequence[tuple[int, int, Item]]) -> list[_Granules]:
    counts: dict[int, int] = {}
    first: dict[int, Item] = {}
    for value, count, item in values:
        counts[value] = counts.get(value, 0) + count
        first.setdefault(value, item)
    return [_Granules(value=v, count=counts[v], item=first[v]) for v in sorted(counts, reverse=True)]


def _pigeonhole(granules: Sequence[_Granules], num_ranks: int) -> BoundTerm | None:
    """Of the k*N+1 largest granules some rank holds k+1; they weigh at least the k+1 smallest of those."""
    ends = list(accumulate(g.count for g in granules))
    sums = list(accumulate(g.count * g.value for g in granules))

    def top_sum(count: int) -> int:
        slot = bisect_left(ends, count)
        return sums[slot] - (ends[slot] - count) * granules[slot].value if count else 0

    best: BoundTerm | None = None
    for k in range(1, min(_MAX_PIGEONHOLES, (ends[-1] - 1) // num_ranks) + 1):
        value = top_sum(k * num_ranks + 1) - top_sum(k * num_ranks - k)
        if best is None or value > best.value:
            best = BoundTerm(reason="pigeonhole", value=value, item=granules[bisect_left(ends, k * num_ranks + 1)].item)
    return best


def _divisors(granules: Sequence[_Granules]) -> list[tuple[int, Item]]:
    chosen = granules
    if len(granules) > _MAX_FLOOR_SIZES:
        chosen = sorted(granules, key=lambda g: (-g.value * g.count, -g.value))[:_MAX_FLOOR_SIZES]
    seen: dict[int, Item] = {}
    for granule in chosen:
        for parts in range(1, _MAX_FLOOR_PARTS + 1):
            for divisor in (granule.value // parts, -(-granule.value // parts)):
                if divisor:
                    seen.setdefault(divisor, granule.item)
    return sorted(seen.items())


def _floor(granules: Sequence[_Granules], num_ranks: int) -> BoundTerm | None:
    """A pile of height S holds at most floor(S / a) pieces of a, and a granule of size w is floor(w / a) of them."""
    best: BoundTerm | None = None
    for divisor, item in _divisors(granules):
        pieces = sum(g.count * (g.value // divisor) for g in granules)
        value = divisor * -(-pieces // num_ranks)
        if best is None or value > best.value:
            best = BoundTerm(reason="floor", value=value, item=item)
    return best


def buffer_bound(problem: Problem, *, with_patterns: bool = True) -> BufferBound:
    """Bound the buffer elements of every layout of ``problem`` from below.

    With N ranks and S the height of a rank's pile (see the module's text), the buffer has N x S elements, and S is at
    least each of:

    - ``total``: the aligned size of all params over N, because the N piles hold them all;
    - ``unit``: the same, rounded up to a multiple of the greatest common divisor of all sizes, because the tallest
      pile holds a sum of such sizes (DeepSeek-V3's experts have sizes u and 2u, 696 u in all: on 128 ranks 5.44 u
      become 6 u, 10.3% padding);
    - ``largest``: the largest granule, because some pile holds it;
    - ``pigeonhole``: the sum of the k+1 smallest among the k x N + 1 largest granules, because some pile holds k+1 of
      those, for every k;
    - ``floor``: a x ceil(sum of floor(w / a) / N) over all granule sizes w, for every a: a pile of height S is worth
      floor(S / a) pieces of size a, and holds no more than it is worth;
    - ``pattern``: the least height at which a linear program over the ways to fill a pile does not prove that N piles
      are too few (see ``freehold.plan.pattern_bound``).

    All are rounded up to the unit of a shard. A granule of a stack counts with its own size, without alignment.

    Args:
        problem: Params of one dtype, in backward order.
        with_patterns: Also solve the linear program of ``pattern_bound``, where it is small.

    Returns:
        The strongest of them, with its cause.

    Example:
        >>> from freehold.plan.problem import Item, Problem
        >>> sizes = [2 * 4096, 4096] * 232
        >>> items = tuple(
        ...     Item(index=i, numel=n, granule_numel=n, cost=n, isolated=False, shape=(n // 64, 64))
        ...     for i, n in enumerate(sizes)
        ... )
        >>> bound = buffer_bound(
        ...     Problem(items=items, num_ranks=128, bucket_numel=None, alignment=64, shard_unit=64))
        >>> bound.active.reason, bound.active.value // 4096, bound.numel // 4096
        ('unit', 6, 768)
    """
    num_ranks, unit = problem.num_ranks, problem.shard_unit
    shared = [item for item in problem.items if not item.isolated]
    isolated_numel = sum(num_ranks * align_up(i.numel, unit) for i in problem.items if i.isolated)
    terms = _buffer_terms(shared, problem, with_patterns) if shared else [BoundTerm(reason="isolated", value=0)]
    terms.sort(key=lambda term: -term.value)
    return BufferBound(
        numel=num_ranks * terms[0].value + isolated_numel,
        real_numel=sum(item.numel for item in problem.items),
        num_ranks=num_ranks,
        active=terms[0],
        terms=tuple(terms),
        isolated_numel=isolated_numel,
    )


def _buffer_terms(shared: Sequence[Item], problem: Problem, with_patterns: bool) -> list[BoundTerm]:
    num_ranks, alignment = problem.num_ranks, problem.alignment
    sizes: list[tuple[int, int, Item]] = []
    for item in shared:
        whole = item.granule_numel == item.numel
        size = align_up(item.numel, alignment) if whole else item.granule_numel
        sizes.append((size, item.numel // item.granule_numel, item))
    granules = _grouped(sizes)
    common = math.gcd(*(g.value for g in granules))
    aligned_mean = -(-sum(align_up(item.numel, alignment) for item in shared) // num_ranks)
    granule_mean = -(-sum(g.value * g.count for g in granules) // num_ranks)
    smallest = granules[-1].item
    terms = [
        BoundTerm(reason="total", value=aligned_mean),
        BoundTerm(reason="largest", value=granules[0].value, item=granules[0].item),
        BoundTerm(reason="unit", value=align_up(granule_mean, common), item=smallest),
    ]
    terms += [t for t in (_pigeonhole(granules, num_ranks), _floor(granules, num_ranks)) if t is not None]
    if with_patterns and len(granules) <= _MAX_PATTERN_SIZES:
        low = align_up(max(t.value for t in terms if t.reason != "total"), common) // common
        height = pattern_bound([g.value // common for g in granules], [g.count for g in granules], num_ranks, low)
        if height > low:
            terms.append(BoundTerm(reason="pattern", value=height * common, item=granules[0].item))
    return [
        BoundTerm(reason=t.reason, value=align_up(align_up(t.value, common), problem.shard_unit), item=t.item)
        if t.reason != "total"
        else BoundTerm(reason=t.reason, value=align_up(t.value, problem.shard_unit))
        for t in terms
    ]


def makespan_bound(problem: Problem) -> MakespanBound:
    """Bound the cost of the dearest rank from below, for every layout of ``problem``.

    A granule's cost falls on one rank. So some rank has at least the mean over the ranks (``total``), the dearest
    granule (``largest``), and the k+1 cheapest among the k x N + 1 dearest granules (``pigeonhole``); rank 0 has at
    least all isolated params (``isolated``).

    Args:
        problem: Params of one dtype, in backward order.

    Returns:
        The strongest of them, with its cause.

    Example:
        >>> from freehold.plan.problem import Item, Problem
        >>> items = tuple(
        ...     Item(index=i, numel=64, granule_numel=64, cost=c, isolated=False, shape=(8, 8))
        ...     for i, c in enumerate((5, 4, 3))
        ... )
        >>> bound = makespan_bound(
        ...     Problem(items=items, num_ranks=2, bucket_numel=None, alignment=64, shard_unit=64))
        >>> bound.cost, bound.active.reason
        (7, 'pigeonhole')
    """
    costs: list[tuple[int, int, Item]] = []
    for item in problem.items:
        count = item.numel // item.granule_numel
        costs.append((item.cost // count, count, item))
    if not costs:
        term = BoundTerm(reason="total", value=0)
        return MakespanBound(cost=0, active=term, terms=(term,))
    granules = _grouped(costs)
    isolated = [item for item in problem.items if item.isolated]
    terms = [
        BoundTerm(reason="total", value=-(-sum(item.cost for item in problem.items) // problem.num_ranks)),
        BoundTerm(reason="largest", value=granules[0].value, item=granules[0].item),
    ]
    hole = _pigeonhole(granules, problem.num_ranks)
    if hole is not None:
        terms.append(hole)
    if isolated:
        terms.append(BoundTerm(reason="isolated", value=sum(i.cost for i in isolated), item=isolated[0]))
    terms.sort(key=lambda term: -term.value)
    return MakespanBound(cost=terms[0].value, active=terms[0], terms=tuple(terms))
