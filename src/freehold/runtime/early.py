"""Updates during backward: an owner need not wait for ``step`` where nothing can forbid the update any more.

[Note: Early updates]
A bucket whose reduction has ended inside backward holds the final average of this window, if no second backward comes:
the option rules that out, as it rules out clipping and the check for inf and NaN. Each owner decides for its own shard
alone, once all its params there have a gradient of its own: then they are used on some rank, which is what ``step``
would find out. All else (params that only others used, buckets that end later) waits for ``step``, which also sends the
new weights round. The same rules see the same numbers, so every bit is the same. The weights that change are those
whose gradients have all arrived, which backward does not read again.

On CUDA the update runs in a stream of its own, beside backward; ``step`` makes its stream wait for that one. The
tensors used there belong to the buckets, which outlive it; temporary ones are allocated and freed in the side stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from freehold.rules import Rule
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.gatherer import WeightGatherer
from freehold.runtime.params import ManagedParam
from freehold.runtime.update import update_bucket

__all__ = ["EarlyUpdater"]


class EarlyUpdater:
    """Updates own shards as their reductions end inside backward.

    Args:
        params_by_name: All managed params.
        gatherer: Waited for where weights of the last step are still being sent.
        groups: Returns the live param groups.
        rules: The rule of each kind.
        device: Of the params.

    Attributes:
        done: Buckets whose own shard has been updated in this window.
        error: What a rule raised; ``step`` tells all ranks.
    """

    def __init__(
        self,
        params_by_name: Mapping[str, ManagedParam],
        gatherer: WeightGatherer,
        groups: Callable[[], Sequence[dict[str, Any]]],
        rules: Mapping[str, Rule],
        device: torch.device,
    ) -> None:
        self.done: set[int] = set()
        self.error: Exception | None = None
        self._params_by_name = params_by_name
        self._gatherer = gatherer
        self._groups = groups
        self._rules = rules
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def update(self, bucket: BucketBuffers) -> None:
        """Update the own shard of a bucket that has just been reduced, if that is final."""
        mine = [self._params_by_name[slot.name] for slot in bucket.owned]
        if not mine or self.error is not None:
            return
        if not all(p.arrived and p.param._version == p.version for p in mine):
            return
        self._gatherer.wait((bucket.index,))
        try:
            self._validate(mine)
            with self._beside_backward():
                used = {p.index for p in mine}
                update_bucket(bucket, self._params_by_name, used, self._groups(), self._rules)
        except Exception as error:  # a rule's: raised by step, on all ranks; here it would leave the others in backward
            self.error = error
        self.done.add(bucket.index)

    def finish(self) -> None:
        """Make what follows wait for all updates, and begin a new window."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self.done.clear()

    def _validate(self, params: Sequence[ManagedParam]) -> None:
        groups = self._groups()
        for index in {p.group for p in params}:
            self._rules[groups[index]["rule"]].validate(groups[index])

    def _beside_backward(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)
