"""The gradient side: from the hooks of autograd to averaged gradients on their owners.

See [Note: Buckets, windows and passes] in ``phases.py``. What keeps ranks together is that launches happen only in
bucket order and that a pass launches every bucket once; so it does not matter in which order, or whether at all,
gradients arrive.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from freehold.errors import LifecycleError, UnsupportedError
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.comm import Comm
from freehold.runtime.early import EarlyUpdater
from freehold.runtime.gradients import IN_FLIGHT
from freehold.runtime.log import FlightLog
from freehold.runtime.params import ManagedParam
from freehold.runtime.phases import GradPhase, move
from freehold.runtime.wording import listed

__all__ = ["GradientReducer", "WindowState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowState:
    """How far this rank is, for comparison with the others.

    Attributes:
        passes_before: Passes in all earlier windows.
        passes: Passes in this window.
        pending: Gradients lie in buckets that no pass has launched.
    """

    passes_before: int
    passes: int
    pending: bool


class GradientReducer:
    """Fills buckets with gradients and reduces them; holds no weights and knows no rule.

    ``syncing`` is false inside ``no_sync()``.

    Args:
        params: All managed params, in model order.
        buckets: All buckets, in bucket order.
        comm: The group.
        log: Where launches and waits are recorded.
    """

    def __init__(self, params: list[ManagedParam], buckets: list[BucketBuffers], comm: Comm, log: FlightLog) -> None:
        self.syncing = True
        self._early: EarlyUpdater | None = None
        self._params = params
        self._buckets = buckets
        self._comm = comm
        self._log = log
        self._limit = comm.max_in_flight
        if any(bucket.grads.pool is not None for bucket in buckets):
            self._finish_sooner()
        self._in_flight: deque[BucketBuffers] = deque()
        self._pass_open = False
        self._discarding = False
        self._next_launch = 0
        self._watched_task = -1
        self._passes = 0
        self._passes_before = 0

    def update_early(self, early: EarlyUpdater) -> None:
        """Hand over every bucket whose reduction ends inside a backward; see [Note: Early updates]."""
        self._early = early
        self._finish_sooner()

    def _finish_sooner(self) -> None:
        self._limit = IN_FLIGHT if self._limit is None else min(self._limit, IN_FLIGHT)

    # ---- called by autograd ------------------------------------------------------------------------------------------

    def watch_backward(self) -> None:
        """A backward reaches the model's outputs: be told when it ends.

        Registered here rather than at the first gradient because that one may arrive inside the inner backward of
        reentrant checkpointing, whose end is not the end of the whole.
        """
        task = torch._C._current_graph_task_id()
        if task == self._watched_task:
            return
        if self._pass_open:  # the backward before this one died of an exception half-way
            self._end_pass()
        self._watched_task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def before_accumulate(self, p: ManagedParam) -> None:
        """Autograd is about to add a gradient to ``p.grad``: make that harmless whatever state the bucket is in."""
        bucket = self._buckets[p.bucket]
        if bucket.grad_phase in (GradPhase.REDUCING, GradPhase.REDUCED):
            if p.in_pass and self._in_pass():
                raise UnsupportedError(
                    f"param {p.name!r} received a second gradient in one backward after its bucket {bucket.index} "
                    "had been reduced. Reentrant activation checkpointing of a module that is used twice does this; "
                    "use checkpoint(..., use_reentrant=False)"
                )
            self._reopen(bucket)
        if self.syncing and not self._pass_open and self._passes == 0:
            self._open_pass()
        p.adds = p.marked() and p.filled
        p.unmark()

    def after_accumulate(self, p: ManagedParam) -> None:
        """``p.grad`` holds a gradient: move it into the bucket, and launch what is complete."""
        grad = p.param.grad
        if grad is None or grad.layout is not torch.strided:
            raise UnsupportedError(
                f"param {p.name!r} received a gradient of layout {None if grad is None else grad.layout}; "
                "only dense gradients are supported (for embeddings: sparse=False)"
            )
        if self._in_pass() and self._buckets[p.bucket].grads.flat is None:
            self._leave_waiting(p)
        else:
            self._store(p, grad)
            if not self._in_pass():
                p.param.grad = p.grad_view if p.viewable else None
                if not p.viewable:
                    p.mark()
                return
            p.mark()
        if not p.in_pass:
            p.in_pass = True
            self._buckets[p.bucket].missing -= 1
            self._launch_complete()

    def _leave_waiting(self, p: ManagedParam) -> None:
        """The bucket has no memory yet: the gradient stays where autograd put it until the bucket is complete."""
        self._begin_filling(self._buckets[p.bucket])
        p.waits = p.filled = p.arrived = True

    def _begin_filling(self, bucket: BucketBuffers) -> None:
        if bucket.grad_phase is GradPhase.IDLE:
            bucket.grad_phase = move(bucket.grad_phase, GradPhase.FILLING)

    def _store(self, p: ManagedParam, grad: Tensor) -> None:
        bucket = self._buckets[p.bucket]
        self._begin_filling(bucket)
        bucket.open_grads()
        assert p.grad_view is not None, f"{bucket.index=} is open"
        if grad is not p.grad_view:
            if p.adds:
                p.grad_view.add_(grad.detach())
            else:
                p.grad_view.copy_(grad.detach())
        p.adds = False
        p.filled = p.arrived = True

    def _backward_ended(self) -> None:
        self._watched_task = -1
        if self._pass_open:
            self._end_pass()

    def progress(self) -> str:
        """How far this rank is, in words, for messages; may be called at any moment."""
        counts = f"passes in this window: {self._passes}, before it: {self._passes_before}"
        index = self._next_launch
        if not self._pass_open or index >= len(self._buckets):
            return f"between backwards; {counts}"
        names = [p.name for p in self._buckets[index].params if p.param.requires_grad and not p.in_pass]
        of = f"{index} of {len(self._buckets)} buckets launched, bucket {index} waits for gradients of {listed(names)}"
        return f"in a backward: {of}; {counts}"

    # ---- passes ------------------------------------------------------------------------------------------------------

    def _in_pass(self) -> bool:
        """Whether gradients that arrive now are launched, rather than kept for the window's second pass."""
        return self.syncing and self._pass_open

    def _open_pass(self) -> None:
        task = torch._C._current_graph_task_id()
        if self._watched_task == -1 and task != -1:  # a backward that did not start at the wrapped module's output
            self._watched_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        self._pass_open = True
        self._passes += 1
        self._next_launch = 0
        for bucket in self._buckets:
            bucket.missing = 0
        for p in self._params:
            p.in_pass = False
            if p.param.requires_grad:
                self._buckets[p.bucket].missing += 1

    def _launch_complete(self) -> None:
        while self._next_launch < len(self._buckets) and self._buckets[self._next_launch].missing == 0:
            self._launch(self._buckets[self._next_launch])
            self._next_launch += 1

    def _end_pass(self) -> None:
        for bucket in self._buckets[self._next_launch :]:
            self._launch(bucket)
        self._next_launch = len(self._buckets)
        self._pass_open = False

    def _launch(self, bucket: BucketBuffers) -> None:
        with (
            torch.no_grad(),
            torch.autograd.profiler.record_function(f"freehold::reduce (bucket {bucket.index})"),
        ):
            if bucket.grad_phase in (GradPhase.REDUCING, GradPhase.REDUCED):
                self._reopen(bucket)
            if self._limit is not None and len(self._in_flight) >= self._limit:
                self._finish_oldest()
            bucket.open_grads()
            for p in bucket.params:
                _ready_for_launch(p)
            assert bucket.grads.flat is not None, f"{bucket.index=} is open"
            bucket.reducing = self._comm.reduce_scatter(bucket.grads.flat, bucket.index)
            bucket.grad_phase = move(bucket.grad_phase, GradPhase.REDUCING)
            self._in_flight.append(bucket)
            self._log.add("reduce launched", bucket.index)

    def _finish_oldest(self) -> None:
        bucket = self._in_flight.popleft()
        assert bucket.reducing is not None, f"{bucket.index=} is in flight without a handle"
        bucket.reducing.wait()
        bucket.reducing = None
        if bucket.grads.keep_own():
            bucket.show_grads()
        if self._comm.num_ranks > 1:
            bucket.grads.own.div_(self._comm.num_ranks)
        if bucket.carry is not None:
            bucket.grads.own.add_(bucket.carry)
            bucket.carry = None
        bucket.grad_phase = move(bucket.grad_phase, GradPhase.REDUCED)
        self._log.add("reduce finished", bucket.index)
        if self._early is not None and self._pass_open and not self._discarding:
            self._early.update(bucket)

    @torch.no_grad()
    def _reopen(self, bucket: BucketBuffers) -> None:
        """A reduced bucket gets more gradient in the same window: set the owner's sum aside."""
        while bucket.grad_phase is GradPhase.REDUCING:
            self._finish_oldest()
        if self._window_was_thrown_away():
            self._start_window()
            return
        bucket.carry = bucket.grads.own.clone()
        for p in bucket.params:
            if p.arrived and (p.thrown_away() or p.foreign_grad() is not None):
                p.arrived = False
                self._clear_carry(bucket, p)
        bucket.grad_phase = move(bucket.grad_phase, GradPhase.FILLING)

    def _clear_carry(self, bucket: BucketBuffers, p: ManagedParam) -> None:
        assert bucket.carry is not None, f"{bucket.index=} was reopened without its sum"
        for slot in p.slots:
            if slot.rank == self._comm.rank:
                bucket.carry[slot.offset : slot.offset + slot.numel].zero_()

    # ---- windows -----------------------------------------------------------------------------------------------------

    def state(self) -> WindowState:
        """This rank's progress, once it has run the window's first pass, with zeros if it had no backward of its own.

        That pass precedes the exchange on every rank: a peer may stand in its backward, waiting for this rank's part.
        """
        if self._pass_open:
            self._end_pass()
        if self._passes == 0:
            self._open_pass()
            self._end_pass()
        return WindowState(
            passes_before=self._passes_before,
            passes=self._passes,
            pending=any(bucket.grad_phase is GradPhase.FILLING for bucket in self._buckets),
        )

    @torch.no_grad()
    def take_in_foreign_grads(self) -> None:
        """Take over gradients that the user put into ``p.grad`` by hand.

        Raises:
            LifecycleError: ``p.grad`` was replaced after its bucket had been reduced.
        """
        if self._pass_open:
            self._end_pass()
        late: list[str] = []
        for p in self._params:
            grad = p.foreign_grad()
            if grad is None:
                if p.arrived and p.thrown_away():
                    p.arrived = False
            elif self._buckets[p.bucket].grad_phase in (GradPhase.REDUCING, GradPhase.REDUCED):
                late.append(p.name)
            else:
                self._store(p, grad)
                p.mark()
        if late:
            raise LifecycleError(
                f"p.grad of {', '.join(map(repr, late))} was replaced after the gradient had been reduced over ranks; "
                "change gradients inside no_sync(), or through clip_grad_norm_ of the optimizer"
            )

    def settle(self, num_passes: int) -> None:
        """Run the passes that this rank lacks, and finish all reductions: every owner then holds its average."""
        while self._passes < num_passes:
            self._open_pass()
            self._end_pass()
        while self._in_flight:
            self._finish_oldest()

    def used(self) -> list[bool]:
        """For every param in model order, whether a gradient arrived in this window."""
        return [p.arrived for p in self._params]

    def end_window(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients: after a step, a skipped step, or a ``zero_grad``."""
        self._discarding = True
        try:
            if self._pass_open:
                self._end_pass()
            while self._in_flight:
                self._finish_oldest()
        finally:
            self._discarding = False
        self._start_window()
        for p in self._params:
            if set_to_none or not p.viewable or p.grad_view is None:
                p.param.grad = None
            else:
                p.grad_view.zero_()
                p.param.grad = p.grad_view

    def _start_window(self) -> None:
        if self._early is not None:
            self._early.discarded()
        open_passes = int(self._pass_open)  # a pass that noticed the discard belongs to the new window
        self._passes_before += self._passes - open_passes
        self._passes = open_passes
        for bucket in self._buckets:
            while bucket.grad_phase is GradPhase.REDUCING:
                self._finish_oldest()
            bucket.carry = None
            if bucket.grads.give_back():
                bucket.show_grads()
            bucket.grad_phase = move(bucket.grad_phase, GradPhase.IDLE)
        pool = self._buckets[0].grads.pool  # one for all
        if pool is not None:
            pool.trim(IN_FLIGHT)
        for p in self._params:
            p.filled = p.arrived = p.waits = False

    def _window_was_thrown_away(self) -> bool:
        arrived = [p for p in self._params if p.arrived]
        return bool(arrived) and all(p.thrown_away() for p in arrived)


def _ready_for_launch(p: ManagedParam) -> None:
    """Leave in the bucket what the param contributes, zeros if nothing, and nothing of the bucket in ``p.grad``."""
    assert p.grad_view is not None, f"the bucket of {p.name} is open"
    if p.filled and p.thrown_away():
        p.filled = p.arrived = False
    if p.filled:
        if p.waits and p.param.grad is not None:
            p.grad_view.copy_(p.param.grad)
        p.mark()
    else:
        p.grad_view.zero_()
        if p.param.grad is p.grad_view:
            p.param.grad = None
    p.filled = p.waits = False
