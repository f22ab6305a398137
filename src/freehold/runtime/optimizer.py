"""``LayerwiseOptimizer``: train with whole-matrix optimizers, the work and the state shared out over ranks."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freehold.errors import LifecycleError, NonFiniteGradientError, PeerError
from freehold.plan import Costs, Layout, Policy
from freehold.rules import Rule
from freehold.runtime import norms
from freehold.runtime.agreement import agree
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.comm import make_comm
from freehold.runtime.consensus import Settled, StepConsensus
from freehold.runtime.early import EarlyUpdater
from freehold.runtime.faults import FaultHandling, collective
from freehold.runtime.gatherer import WeightGatherer
from freehold.runtime.gradients import GradMemory
from freehold.runtime.guard import StaleReadGuard
from freehold.runtime.hooks import HookSet, is_compiled
from freehold.runtime.inspection import Inspection
from freehold.runtime.live_options import LiveOptions
from freehold.runtime.log import FlightLog
from freehold.runtime.loss_scaling import LossScaling
from freehold.runtime.params import ManagedParam
from freehold.runtime.reducer import GradientReducer
from freehold.runtime.registry import claim, next_stripe, release
from freehold.runtime.routing import Group
from freehold.runtime.setup import Options, agreed_blueprint, build, resolve_group
from freehold.runtime.update import refresh_masters, update_bucket
from freehold.runtime.verify import verify_ranks
from freehold.runtime.wording import listed

__all__ = ["LayerwiseOptimizer"]


class LayerwiseOptimizer(FaultHandling, Inspection, LossScaling, torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` in which every matrix is owned outright by one rank.

    Gradients are averaged over the group bucket by bucket while backward runs; each rank updates only what it owns;
    new weights are gathered while the next forward runs. It replaces ``DistributedDataParallel`` and the optimizer::

        opt = LayerwiseOptimizer(model, matrix=Muon(lr=0.02), elementwise=AdamW(lr=3e-4))
        loss.backward(); opt.clip_grad_norm_(1.0); opt.step(); opt.zero_grad()

    Making one, ``step``, ``clip_grad_norm_`` and ``close`` are collective: every rank of the group calls them. All
    ranks start from the weights and buffers of group rank 0. The model's params become views of flat buffers: write
    to them in place (``p.copy_``, ``load_state_dict``), not by assigning ``p.data``.

    Once gradients have been reduced, ``p.grad`` is a placeholder of NaNs without memory: the averaged gradient of a
    matrix exists on its owner only. ``reduced_grads()`` shows those of this rank. Between ``step`` and the next forward
    some weights may still be on their way; whatever reads them in this thread waits for them first (``synchronize()``
    waits for all, and is what another thread must call).

    Args:
        model_or_named_params: The model, or ``model.named_parameters()``. With a model, gathers overlap with forward;
            without, ``step`` finishes them itself.
        matrix: The rule for whole matrices, or ``None`` if there are to be none.
        elementwise: The rule for all else, or ``None`` if there is to be nothing else.
        groups: Options and routing by qualified name; the first that matches wins. Each becomes a param group.
        process_group: The data-parallel group. By default WORLD if torch.distributed is initialised, else this process.
        bucket_numel: Soft minimum of a bucket's elements: a number, ``None`` for one bucket, or ``"default"``.
        policy: How buckets are laid out: a name of ``freehold.plan.policy_names()``, or a callable.
        reduce_dtype: Dtype in which gradients are accumulated and summed (float64 for float64 params).
        overlap: Gather weights during the next forward; if false, ``step`` returns with all weights current.
        on_nonfinite: What ``step`` does about inf or NaN in a gradient, on all ranks alike: ``"raise"``, or ``"skip"``
            the step with a warning, and either way nothing is updated; ``"ignore"`` does not look.
        grad_memory: ``"full"`` keeps a gradient buffer for every bucket. ``"sharded"`` frees a bucket's after its
            reduction, but for the part that this rank owns: less memory, a little more work; ``p.grad`` is then never
            zeros, ``zero_grad(set_to_none=False)`` sets ``None`` too.
        early_update: Update what this rank owns during backward already, as reductions end; the results have the same
            bits. It needs ``on_nonfinite="ignore"``, one synchronising backward a window, and no clipping; gradients
            can then not be discarded, and between backward and ``step`` ranks hold different weights.
        costs: What a matrix of each shape costs, to balance by, equal on all ranks: ``CostModel.table(...)`` of one of
            them, say. ``None`` is as for ``plan``.
        timeout_s: The longest that this rank waits for another, in seconds; then it raises ``PeerError``. ``None`` for
            the process group's own (gloo: 30 minutes). nccl's watchdog has the group's, whatever is given here.
        verify_every: Call ``verify()`` at the end of every such step; by default never. It waits for all weights.

    Attributes:
        layout: The plan, a ``freehold.plan.Layout``.
        num_skipped_steps: Steps skipped for non-finite gradients.

    Raises:
        RoutingError: A pattern that matches nothing, no matrix although ``matrix`` was given, duplicate params.
        PlanError, PlanTypeError: An argument out of range or of the wrong type.
        UnsupportedError: Params on meta, empty, sparse, complex or on several devices.
        ConsistencyError: The ranks' models or arguments differ. Whatever one rank refuses, all refuse.
        LifecycleError: The params have such an optimizer already, or this rank is not in the group.

    Example:
        >>> import torch, freehold
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        >>> opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(lr=0.02), elementwise=freehold.AdamW())
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> opt.step()
        >>> opt.zero_grad()
        >>> opt.close()
    """

    def __init__(
        self,
        model_or_named_params: nn.Module | Iterable[tuple[str, nn.Parameter]],
        *,
        matrix: Rule | None,
        elementwise: Rule | None,
        groups: Sequence[Group] | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        bucket_numel: int | str | None = "default",
        policy: str | Policy = "packed",
        reduce_dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        on_nonfinite: str = "raise",
        grad_memory: GradMemory = "full",
        early_update: bool = False,
        costs: Costs | None = None,
        timeout_s: float | None = None,
        verify_every: int | None = None,
    ) -> None:
        group = resolve_group(process_group)
        rules = {"matrix": matrix, "elementwise": elementwise}
        options = Options(
            rules={kind: rule for kind, rule in rules.items() if rule is not None},
            groups=() if groups is None else groups,
            bucket_numel=bucket_numel,
            policy=policy,
            reduce_dtype=reduce_dtype,
            on_nonfinite=on_nonfinite,
            overlap=overlap,
            grad_memory=grad_memory,
            early_update=early_update,
            costs=costs,
            timeout_s=timeout_s,
            verify_every=verify_every,
        )
        self._sealed = self._closed = False
        self._options = options
        self._blueprint = agreed_blueprint(model_or_named_params, options, group)
        device = self._blueprint.routes[0].named.param.device
        self._comm = make_comm(group, device, next_stripe(group), timeout_s)
        del group, process_group  # torch's first import of its compiler, below, keeps this frame; see Comm.detach
        params, buckets = build(self._blueprint, options, self._comm)
        super().__init__(self._blueprint.param_groups, _defaults(options))
        self._start(params, buckets)
        self._sealed = True

    def _start(self, params: list[ManagedParam], buckets: list[BucketBuffers]) -> None:
        module = self._blueprint.module
        self.layout: Layout = self._blueprint.layout
        self.num_skipped_steps = 0
        self._num_unverified_steps = 0
        self._update_error: Exception | None = None
        self._params = params
        routes, kinds = self._blueprint.routes, [group["rule"] for group in self.param_groups]
        self._live_options = LiveOptions(kinds, self._blueprint.group_of, routes, self._options.rules)
        self._frozen = self._blueprint.frozen
        self._buckets = buckets
        self._by_name = {p.name: p for p in params}
        self._log = FlightLog()
        self._reducer = GradientReducer(params, buckets, self._comm, self._log)
        names = [[p.name for p in bucket.params] for bucket in buckets]
        self._comm.watch.attach(self._log, names, self._reducer.progress)  # not self's: that would be a cycle
        self._gatherer = WeightGatherer(buckets, self._comm, self._log)
        self._guard = StaleReadGuard(self._gatherer)
        # An optimizer that is dropped, not closed, leaves behind neither stale weights nor its guard (and buffers).
        weakref.finalize(self, _abandon, self._gatherer, self._guard).atexit = False
        # Compiled code reads weights where neither hooks nor the guard see it.
        self._overlaps = self._options.overlap and module is not None and not is_compiled(module)
        named = [r.named for r in routes]
        self._consensus = StepConsensus(params, buckets, self._frozen, self._reducer, self._comm)
        self._early = EarlyUpdater(self._gatherer, self.param_groups, self._options.rules)
        if self._options.early_update:
            self._reducer.update_early(self._early)
        self._hooks = HookSet(module, params, self._reducer, self._gatherer, self._guard)
        claim(named, self)

    # ---- the training loop -------------------------------------------------------------------------------------------

    @torch.no_grad()
    @collective
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is left, update what this rank owns, and send the new weights round. Collective.

        Args:
            closure: Evaluates the model and calls ``backward``; its value is returned.

        Returns:
            What ``closure`` returned, or ``None``.

        Raises:
            NonFiniteGradientError: A gradient holds inf or NaN (with ``on_nonfinite="raise"``); nothing was updated.
            ConsistencyError: Ranks disagree about the window or the options, or one of them failed; on all ranks.
            RuleError: A param group was given an option that its rule cannot work with; on all ranks.
            LifecycleError: Closed; a param was thawed or moved; ``p.grad`` was replaced after its reduction; a rank was
                lost before.
            PeerError: A rank died, or did not answer in ``timeout_s``. From then on only ``close`` works.
        """
        self._refuse_if_closed()
        value, error = None, None
        if closure is not None:
            try:
                with torch.enable_grad():
                    value = closure()
            except Exception as found:  # every rank must learn of it before anyone leaves
                error = found
        settled = self._settle("step", error)
        self.synchronize()
        if self._options.on_nonfinite != "ignore" and not norms.all_finite(self._buckets, self._comm):
            self._refuse_nonfinite()
            return value
        self._update(settled)
        self._reducer.end_window()
        self._num_unverified_steps += 1
        verify_is_due = self._num_unverified_steps == self._options.verify_every
        if verify_is_due:  # a collective: the rank whose update failed must not leave the others alone in it
            agree(self._comm, self._update_error, doing="step")
        if self._update_error is not None:
            self._gatherer.wait_all()
            raise self._update_error
        if not self._overlaps:
            self._gatherer.wait_all()
        elif self._gatherer.busy:
            self._guard.install()
        if verify_is_due:
            self._num_unverified_steps = 0
            self.synchronize()
            verify_ranks(self)
        return value

    @torch.no_grad()
    @collective
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the averaged gradients so that their norm is at most ``max_norm``. Collective; call it before ``step``.

        Args:
            max_norm: The largest norm allowed.
            norm_type: The exponent; ``inf`` for the largest absolute value.

        Returns:
            The norm before scaling, over every distinct param once, a 0-d tensor with the same bits on all ranks.

        Raises:
            PlanError, PlanTypeError: An argument is no norm.
            ConsistencyError: As in ``step``.
        """
        self._refuse_if_closed()
        error = None
        try:
            norms.check_norm_arguments(max_norm, norm_type)
        except (ValueError, TypeError) as found:
            error = found
        if self._options.early_update and error is None:
            error = LifecycleError("gradients cannot be clipped with early_update=True: weights may have been updated")
        self._settle("clip_grad_norm_", error)
        norm = norms.global_norm(self._buckets, float(norm_type), self._comm)
        if bool(torch.isfinite(norm)):
            norms.scale_gradients(self._buckets, norm, float(max_norm))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard this window's gradients and begin a new window.

        Args:
            set_to_none: Set ``p.grad`` to ``None``; if false, to zeros where it is a view of the bucket.
        """
        self._refuse_if_closed()
        self._early.refuse_discard()
        with torch.no_grad():
            self._reducer.end_window(set_to_none=set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: a backward inside reduces nothing. Leave it for a window's last backward."""
        self._refuse_if_closed()
        before, self._reducer.syncing = self._reducer.syncing, False
        try:
            yield
        finally:
            self._reducer.syncing = before

    def synchronize(self) -> None:
        """Wait until this rank holds all current weights. Needs no other rank to call it."""
        self._guard.remove()
        self._gatherer.wait_all()

    def close(self) -> None:
        """Finish what is under way, take off all hooks and give the params back. Collective; further calls do nothing.

        The params keep their values and can be wrapped again. After a ``PeerError`` nothing is waited for, and weights
        that were on their way may be those of the step before.
        """
        if self._closed:
            return
        try:
            if self._comm.watch.failure is None:
                with torch.no_grad():
                    self._reducer.end_window()
                self.synchronize()
                if self._options.early_update:  # owners may be ahead of the others
                    self._early.join()
                    for bucket in reversed(self._buckets):
                        self._gatherer.launch(bucket)
                    self._gatherer.wait_all()
        finally:
            self._guard.retire()
            self._hooks.remove()
            release([r.named for r in self._blueprint.routes], self)
            self._comm.detach()
            self._closed = True

    # ---- one step, in parts ------------------------------------------------------------------------------------------

    def _settle(self, operation: str, error: Exception | None) -> Settled:
        if error is None and self._update_error is None and self._early.error is not None:
            error = self._update_error = self._early.error
        elif error is None and self._update_error is not None:
            error = LifecycleError(
                f"the update of an earlier step failed half-way ({self._update_error}); start again from a checkpoint"
            )
        if error is None:
            try:
                self._live_options.check(self.param_groups)
            except Exception as found:
                error = found
        return self._consensus.settle(operation, self.param_groups, error, single_pass=self._options.early_update)

    def _refuse_nonfinite(self) -> None:
        names = [name for found in self._comm.gather_objects(norms.nonfinite_names(self._buckets)) for name in found]
        shown = listed(sorted(set(names)))
        if self._options.on_nonfinite == "raise":
            raise NonFiniteGradientError(
                f"the averaged gradient of {shown} holds inf or NaN; nothing was updated. Call zero_grad() and go "
                "on, or make the optimizer with on_nonfinite='skip'"
            )
        self.num_skipped_steps += 1
        self._reducer.end_window()
        warnings.warn(
            f"step skipped on all ranks ({self.num_skipped_steps} so far): "
            f"the averaged gradient of {shown} holds inf or NaN",
            stacklevel=5,
        )

    def _update(self, settled: Settled) -> None:
        used, written = settled.used, settled.written
        self._early.join()
        # Reverse order: the next forward reads the last bucket first, so its weights leave first.
        for bucket in reversed(self._buckets):
            if written:
                refresh_masters(bucket, written)
            indices = {p.index for p in bucket.params}
            if indices & used and bucket.index not in self._early.done:
                try:
                    update_bucket(bucket, used, self.param_groups, self._options.rules)
                except Exception as error:  # the peers wait for this bucket's weights: send them, then raise
                    self._update_error = self._update_error or error
            if indices & (used | written):
                self._gatherer.launch(bucket)
        self._early.reset()
        for index in used:
            self._params[index].num_steps += 1

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LifecycleError("this optimizer was closed")
        self._comm.watch.refuse_after_failure()

    # ---- what torch.optim.Optimizer offers and we do not -------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Params cannot be added: the layout is planned for all of them at once.

        Raises:
            LifecycleError: Always, once the optimizer is made.
        """
        if self._sealed:
            raise LifecycleError(
                "params cannot be added after the layout was planned; close() this optimizer and make a new one"
            )
        super().add_param_group(param_group)


def _abandon(gatherer: WeightGatherer, guard: StaleReadGuard) -> None:
    with contextlib.suppress(PeerError, LifecycleError):  # a rank was lost: there is nothing to wait for
        gatherer.wait_all()
    guard.retire()


def _defaults(options: Options) -> dict[str, Any]:
    first = next(iter(options.rules.values())).defaults()
    return {"lr": first["lr"], "weight_decay": first.get("weight_decay", 0.0)}
