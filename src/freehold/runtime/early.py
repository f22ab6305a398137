"""Updates during backward: an owner need not wait for ``step`` where nothing can forbid the update any more.

[Note: Early updates]
A bucket whose reduction has ended inside backward holds the final average of this window, if no second backward comes:
the option rules that out, as it rules out clipping and the check for inf and NaN. Each owner decides for its own shard
alone, once all its params there have a gradient of its own: then they are used on some rank, which is what ``step``
would find out. All else (params that only others used, the last ``IN_FLIGHT`` buckets) waits for ``step``, which also
sends the new weights round. The same rules see the same numbers, so every bit is the same.

From the first update to ``step`` the window cannot be taken back: whatever would discard it is refused, or noted and
refused by the next ``step`` on all ranks. A weight whose gradient has arrived is normally not read by backward again.
Where it is (a detached use further down, whose backward comes later), autograd finds the version of the weight moved,
and raises: on every rank, because all of them move it, owners or not.

On CUDA the update runs in a stream of its own, beside backward; ``step`` makes its stream wait for that one before it
does anything with weights. The tensors used there belong to the buckets, which outlive it; temporary ones are allocated
and freed in the side stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from freehold.errors import LifecycleError
from freehold.rules import Rule
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.gatherer import WeightGatherer
from freehold.runtime.params import ManagedParam
from freehold.runtime.update import update_bucket

__all__ = ["EarlyUpdater"]


class EarlyUpdater:
    """Updates own shards as their reductions end inside backward.

    Args:
        gatherer: Waited for where weights of the last step are still being sent.
        groups: The live param groups.
        rules: The rule of each kind.

    Attributes:
        done: Buckets whose own shard has been updated in this window.
        error: What a rule raised, or that updated weights cannot be taken back; ``step`` tells all ranks.
    """

    def __init__(
        self,
        gatherer: WeightGatherer,
        groups: Sequence[dict[str, Any]],
        rules: Mapping[str, Rule],
    ) -> None:
        self.done: set[int] = set()
        self.error: Exception | None = None
        self._gatherer = gatherer
        self._groups = groups
        self._rules = rules
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def update(self, bucket: BucketBuffers) -> None:
        """Update the own shard of a bucket that has just been reduced, if that is final."""
        mine = [part.param for part in bucket.parts]
        is_final = all(p.arrived and p.param._version == p.version for p in mine)
        self._gatherer.wait((bucket.index,))
        torch.autograd.graph.increment_version([p.param for p in bucket.params if p.param._version == p.version])
        for p in bucket.params:
            if p.param._version == p.version + 1:
                p.version += 1
        if not mine or not is_final or self.error is not None:
            return
        try:
            self._validate(mine)
            with self._beside_backward(bucket.memory.master.device):
                update_bucket(bucket, {p.index for p in mine}, self._groups, self._rules)
        except Exception as error:  # a rule's: raised by step, on all ranks; here it would leave the others in backward
            self.error = error
        self.done.add(bucket.index)

    def refuse_discard(self) -> None:
        """Weights that have been updated cannot be taken back.

        Raises:
            LifecycleError: Some have been in this window.
        """
        if self.done:
            raise LifecycleError(
                "weights have been updated with these gradients (early_update=True): call step() first"
            )

    def discarded(self) -> None:
        """The window was thrown away where that could not be refused: let the next ``step`` say so."""
        if self.done and self.error is None:
            self.error = LifecycleError(
                "gradients were discarded after weights had been updated with them (early_update=True); "
                "start again from a checkpoint"
            )

    def join(self) -> None:
        """Make what follows in the current stream wait for all updates."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def reset(self) -> None:
        """A new window, or new weights, begin."""
        self.join()
        self.done.clear()
        self.error = None

    def _validate(self, params: Sequence[ManagedParam]) -> None:
        for index in {p.group for p in params}:
            self._rules[self._groups[index]["rule"]].validate(self._groups[index])

    def _beside_backward(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        if device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)
