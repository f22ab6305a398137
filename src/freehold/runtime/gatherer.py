"""The weight side: all-gathers launched after the owners' update, waited for where weights are read.

Gathers run in reverse bucket order, because forward reads the params of the last bucket first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.comm import Comm
from freehold.runtime.log import FlightLog
from freehold.runtime.phases import WeightPhase, move

__all__ = ["WeightGatherer"]


class WeightGatherer:
    """Launches and finishes the all-gathers; the one place that knows which weights are stale.

    Args:
        buckets: All buckets, in bucket order.
        comm: The group.
        log: Where launches and waits are recorded.
    """

    def __init__(self, buckets: list[BucketBuffers], comm: Comm, log: FlightLog) -> None:
        self._buckets = buckets
        self._comm = comm
        self._log = log
        self._bucket_of = {id(p.param): b.index for b in buckets for p in b.params}
        self._num_gathering = 0

    @property
    def busy(self) -> bool:
        """Whether any weight may be stale."""
        return self._num_gathering > 0

    def launch(self, bucket: BucketBuffers) -> None:
        """The owners have updated this bucket: send it round."""
        with torch.autograd.profiler.record_function(f"freehold::gather (bucket {bucket.index})"):
            bucket.weight_phase = move(bucket.weight_phase, WeightPhase.UPDATED)
            self._log.add("updated", bucket.index)
            versions = [p.param for p in bucket.params]
            torch.autograd.graph.increment_version(versions)
            for p in bucket.params:
                p.version = p.param._version
            bucket.gathering = self._comm.all_gather(bucket.memory.weights, bucket.index)
            bucket.weight_phase = move(bucket.weight_phase, WeightPhase.GATHERING)
            self._num_gathering += 1
            self._log.add("gather launched", bucket.index)

    def wait(self, indices: Iterable[int]) -> None:
        """Make the weights of these buckets current."""
        for index in indices:
            if self._buckets[index].weight_phase is WeightPhase.GATHERING:
                self._finish(self._buckets[index])

    def wait_for_param(self, param: torch.Tensor) -> None:
        """Make one Parameter current, if it is ours."""
        index = self._bucket_of.get(id(param))
        if index is not None:
            self.wait((index,))

    def wait_all(self) -> None:
        """Make all weights current, in the order in which the gathers were launched."""
        if self._num_gathering:
            self.wait(range(len(self._buckets) - 1, -1, -1))

    def _finish(self, bucket: BucketBuffers) -> None:
        assert bucket.gathering is not None, f"{bucket.index=} is gathering without a handle"
        with torch.autograd.profiler.record_function(f"freehold::wait (bucket {bucket.index})"):
            bucket.gathering.wait()
        bucket.gathering = None
        bucket.weight_phase = move(bucket.weight_phase, WeightPhase.READY)
        self._num_gathering -= 1
        self._log.add("gather finished", bucket.index)
