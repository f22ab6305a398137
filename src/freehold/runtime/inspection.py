"""What the optimizer tells of itself: its layout and memory, the owned gradients, the state as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import Tensor

from freehold.errors import PlanTypeError
from freehold.plan import Layout
from freehold.runtime.buffers import BucketBuffers
from freehold.runtime.checkpoint.full import full_optim_state_dict, load_optim_state_dict
from freehold.runtime.checkpoint.meeting import meet
from freehold.runtime.comm import Comm
from freehold.runtime.describe import MemoryReport, describe, measure_memory
from freehold.runtime.faults import collective
from freehold.runtime.routing import NamedParam
from freehold.runtime.setup import Blueprint
from freehold.runtime.verify import verify_ranks

if TYPE_CHECKING:
    from freehold.runtime.optimizer import LayerwiseOptimizer

__all__ = ["Inspection"]


class Inspection:
    """The part of ``LayerwiseOptimizer`` that shows what it holds."""

    layout: Layout
    _blueprint: Blueprint
    _buckets: list[BucketBuffers]
    _comm: Comm
    _frozen: Sequence[NamedParam]

    @property
    def _whole(self) -> LayerwiseOptimizer:
        return cast("LayerwiseOptimizer", self)

    # ---- looking inside ----------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Every param's rule, owner and bucket, the padding, and each rank's share of the work, as text."""
        return describe(self.layout, self._blueprint.routes, self._frozen, self._buckets, self._comm)

    def memory(self) -> MemoryReport:
        """The bytes that this rank holds, from the tensors themselves."""
        return measure_memory(self._buckets)

    def reduced_grads(self) -> Iterator[tuple[str, int, Tensor]]:
        """The averaged gradients that this rank owns: reduced by ``clip_grad_norm_``, consumed by ``step``.

        Yields:
            The param's name, the first element of the piece in the flattened param, and the piece ``(n,)``, a view.
        """
        for bucket in self._buckets:
            for part in bucket.parts:
                yield part.param.name, part.slot.start, bucket.grads.own[part.elements]

    # ---- state as a whole --------------------------------------------------------------------------------------------

    @collective
    def state_dict(self) -> dict[str, Any]:
        """The whole state, gathered from all owners into CPU memory, on every rank. Collective: all ranks call it.

        It is never this rank's part alone. For large models see ``freehold.save``, which gathers nothing, and
        ``freehold.full_optim_state_dict(opt)``, which gathers to group rank 0.

        Returns:
            State by qualified name, not by position: ``step``, ``master``, and the rule's state, in the params' shapes.

        Raises:
            ConsistencyError: Some ranks made another call, for example because only rank 0 saves.
        """
        state = full_optim_state_dict(self._whole, rank0_only=False)
        assert state is not None, "every rank gets it"
        return state

    @collective
    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what ``state_dict()`` returned, at any number of ranks. Collective: each rank passes the whole.

        The model's weights are not part of it: load those as well, before or after.

        Raises:
            CheckpointError: It is something else, or names, shapes or dtypes differ; nothing was loaded.
        """
        load_optim_state_dict(self._whole, state_dict)

    @collective
    def verify(self) -> None:
        """Compare the ranks' weights, step counters and options, by hash. Collective; cheap enough for now and then.

        Raises:
            ConsistencyError: They differ; on all ranks, naming the first param that does and the ranks.
        """
        meet(self._whole, "verify")
        verify_ranks(self._whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise PlanTypeError("a LayerwiseOptimizer cannot be copied: it owns hooks and a share of the group's state")

    def __reduce__(self) -> NoReturn:
        raise PlanTypeError("a LayerwiseOptimizer cannot be pickled: it owns hooks and a share of the group's state")
