"""Whether the ranks still hold the same: replicas of weights, step counters and options, compared by hash.

A hash is a sum over 4-byte words, each multiplied with an odd number that depends on its place, modulo 2**64. Any
change that is confined to one word changes the hash for certain, since an odd factor times a difference below 2**32 is
not 0; any other change but for an unlikely coincidence. It is computed where the weights are, and gives the same on
every device, since integers are added.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freehold.errors import ConsistencyError
from freehold.runtime.consensus import options_text

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["hash_tensor", "verify_ranks"]

_WORDS = 2**18  # at a time: 4 MB of scratch
_FACTOR = 0x9E3779B1  # 2**32 over the golden ratio, which spreads consecutive numbers (Knuth, TAOCP 3, 6.4)
_CHAIN = 0x2545F4914F6CDD1D  # of xorshift64* (Vigna, https://arxiv.org/abs/1402.6246)


@torch.no_grad()
def verify_ranks(opt: LayerwiseOptimizer) -> None:
    """Raise on every rank if any two of them differ; weights must be current. Collective.

    Raises:
        ConsistencyError: Naming what differs first, and on which ranks.
    """
    named = [(f"weight {p.name!r}", p.param.detach()) for p in opt._params]
    named += [(f"frozen weight {item.name!r}", item.param.detach()) for item in opt._frozen]
    buckets = [hash_tensor(bucket.memory.weights) for bucket in opt._buckets]
    frozen = [hash_tensor(item.param.detach()) for item in opt._frozen]
    steps = tuple(p.num_steps for p in opt._params)
    row = torch.tensor([*buckets, *frozen, _hash_text(repr(steps)), _hash_text(options_text(opt.param_groups))])
    rows = opt._comm.exchange(row)
    masters = _stale_masters(opt)
    stale = opt._comm.max_(torch.tensor([bool(masters)], dtype=torch.uint8))
    if bool((rows == rows[0]).all()) and not bool(stale[0]):
        return
    found = {what: str(hash_tensor(tensor)) for what, tensor in named}
    found |= {f"step counter of {p.name!r}": str(p.num_steps) for p in opt._params}
    found |= {"param_groups": options_text(opt.param_groups)}
    tables = opt._comm.gather_objects((found, masters))
    raise ConsistencyError(_difference([table for table, _ in tables], [names for _, names in tables]))


def _stale_masters(opt: LayerwiseOptimizer) -> list[str]:
    """Params whose master on this rank, their owner, is not what their weight was rounded from."""
    names: list[str] = []
    for bucket in opt._buckets:
        if not bucket.master_is_copy:
            continue
        for part in bucket.parts:
            p, weights = part.param, bucket.memory.own_weights[part.elements]
            rounded = bucket.memory.master[part.elements].to(weights.dtype)
            if p.param._version == p.version and not _same_bits(rounded, weights):
                names.append(p.name)
    return names


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _difference(tables: list[dict[str, str]], masters: list[list[str]]) -> str:
    for what in tables[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            ranks_by_value.setdefault(table[what], []).append(rank)
        if len(ranks_by_value) > 1:
            groups = sorted(ranks_by_value.values(), key=len)
            parts = " from that of ".join(f"ranks {ranks}" for ranks in groups[:2])
            return (
                f"ranks have parted: {what} of {parts} differs"
                + (f" ({len(groups)} different values in all)" if len(groups) > 2 else "")
                + ". Something wrote to it on some ranks only, or memory is faulty; go on from the last checkpoint"
            )
    for rank, names in enumerate(masters):
        if names:
            return (
                f"the weight of {names[0]!r} is not its fp32 master, rounded, on rank {rank}, its owner: something "
                "wrote to it behind PyTorch's back; go on from the last checkpoint"
            )
    return "ranks have parted: padding of a weight buffer differs; go on from the last checkpoint"


def hash_tensor(tensor: Tensor) -> int:
    """A number from -2**63 to 2**63 - 1 that depends on every bit of a tensor, the same on every device.

    Args:
        tensor: Of any shape and dtype.

    Example:
        >>> hash_tensor(torch.zeros(5)), hash_tensor(torch.ones(2)) == hash_tensor(torch.ones(3))
        (0, False)
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 4 * 4
    words = flat[:whole].view(torch.int32) if flat.data_ptr() % 4 == 0 else flat[:whole].clone().view(torch.int32)
    total = _hash_words(flat[whole:].to(torch.int32))
    factors = _factors(min(_WORDS, words.numel()), tensor.device)
    for part in words.split(_WORDS):
        total = (total * _CHAIN + _hash_words(part, factors)) % 2**64
    return total - 2**64 if total >= 2**63 else total  # as int64 holds it


def _factors(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_FACTOR).bitwise_or_(1)


def _hash_words(words: Tensor, factors: Tensor | None = None) -> int:
    if factors is None:
        factors = _factors(words.numel(), words.device)
    return int((words * factors[: words.numel()]).sum().item()) % 2**64


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
