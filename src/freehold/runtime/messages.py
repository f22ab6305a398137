"""Control messages between the ranks of a gloo group: small, point to point, each with a limit on its wait.

A message says which kind of exchange its sender is in and how long it is. So ranks that make different calls find out
at once, instead of taking each other's bytes for their own.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from freehold.errors import ConsistencyError, PeerError
from freehold.runtime.peers import ConnectionLostError, PeerWatch, Transfer

__all__ = ["Kind", "Messages", "receive", "send"]

# Kind and length, and as many bytes as fit, in one message of this size; the rest follows in a second one.
_HEAD_BYTES = 16
_MESSAGE_BYTES = 256
_ROOM = _MESSAGE_BYTES - _HEAD_BYTES
_HEAD, _REST, _BROADCAST = 0, 1, 2


class Kind(enum.StrEnum):
    """What an exchange is about; the text goes into messages."""

    NUMBERS = "an exchange of numbers"
    FLAGS = "an exchange of flags"
    OBJECTS = "an exchange of objects"


_KINDS = tuple(Kind)


class Messages:
    """Swaps and broadcasts of bytes.

    Args:
        group: The process group.
        rank: This rank's number in it.
        num_ranks: Ranks of it.
        watch: Limits and reports the waits.
        tag: The first of three tags that nobody else uses.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, num_ranks: int, watch: PeerWatch, tag: int) -> None:
        self._group = group
        self._rank = rank
        self._num_ranks = num_ranks
        self._peers = [r for r in range(num_ranks) if r != rank]
        self._watch = watch
        self._tag = tag

    def detach(self) -> None:
        """Let go of the group."""
        self._group = None

    def swap(self, kind: Kind, payload: Tensor) -> list[Tensor]:
        """Every rank's bytes, by rank.

        Args:
            kind: The same on all ranks.
            payload: ``(n,)`` uint8; ``n`` may differ between ranks for objects only.

        Raises:
            ConsistencyError: Ranks are in different calls.
            PeerError: A rank died, or did not answer in time.
        """
        mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        mine[:_HEAD_BYTES].view(torch.int64).copy_(torch.tensor([_KINDS.index(kind), payload.numel()]))
        mine[_HEAD_BYTES:][: payload.numel()] = payload[:_ROOM]
        heads = {r: torch.empty_like(mine) for r in self._peers}
        self._send_and_receive(dict.fromkeys(self._peers, mine), heads, _HEAD, kind)
        sizes = self._checked_sizes(heads, kind, payload.numel())
        rests = {r: torch.empty(size - _ROOM, dtype=torch.uint8) for r, size in sizes.items() if size > _ROOM}
        longer = dict.fromkeys(self._peers, payload[_ROOM:]) if payload.numel() > _ROOM else {}
        self._send_and_receive(longer, rests, _REST, kind)
        parts: list[Tensor] = []
        for r in range(self._num_ranks):
            if r == self._rank:
                parts.append(payload.clone())
            elif r in rests:
                parts.append(torch.cat([heads[r][_HEAD_BYTES:], rests[r]]))
            else:
                parts.append(heads[r][_HEAD_BYTES:][: sizes[r]].clone())
        return parts

    def broadcast(self, flat: Tensor) -> None:
        """Overwrite ``flat`` ``(n,)`` uint8 with that of group rank 0.

        Raises:
            PeerError: A rank died, or did not answer in time.
        """
        if self._rank == 0:
            self._send_and_receive(dict.fromkeys(self._peers, flat), {}, _BROADCAST, "a broadcast from rank 0")
        else:
            self._send_and_receive({}, {0: flat}, _BROADCAST, "a broadcast from rank 0")

    def _send_and_receive(self, sent: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: int, what: str) -> None:
        if not sent and not into:
            return
        with self._watch.starting(what):
            transfers = [receive(self._group, tensor, r, self._tag + tag) for r, tensor in into.items()]
            transfers += [send(self._group, tensor, r, self._tag + tag) for r, tensor in sent.items()]
        self._watch.wait(transfers, what)

    def _checked_sizes(self, heads: Mapping[int, Tensor], kind: Kind, numel: int) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for peer, head in heads.items():
            index, sizes[peer] = head[:_HEAD_BYTES].view(torch.int64).tolist()
            theirs = _KINDS[index]
            if theirs is not kind or (sizes[peer] != numel and kind is not Kind.OBJECTS):
                calling = f" of {self._watch.calling}" if self._watch.calling else ""
                text = (
                    f"ranks are in different calls: rank {self._rank} is in {kind}{calling} ({numel} bytes), "
                    f"rank {peer} in {theirs} ({sizes[peer]} bytes). Call step, clip_grad_norm_, verify, save, load "
                    "and state_dict in the same order on all ranks"
                )
                self._watch.failure = PeerError(text)  # without hanging up: the peers have to read theirs first
                raise ConsistencyError(text)
        return sizes


def send(group: dist.ProcessGroup | None, tensor: Tensor, peer: int, tag: int) -> Transfer:
    """Start sending a contiguous tensor to a group rank."""
    with _naming(peer):
        return Transfer(work=dist.isend(tensor, group=group, group_dst=peer, tag=tag), peer=peer)


def receive(group: dist.ProcessGroup | None, tensor: Tensor, peer: int, tag: int) -> Transfer:
    """Start receiving into a contiguous tensor from a group rank."""
    with _naming(peer):
        return Transfer(work=dist.irecv(tensor, group=group, group_src=peer, tag=tag), peer=peer)


@contextlib.contextmanager
def _naming(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionLostError(peer, str(error)) from error
