"""What the tests of reported cases, bad input and lifecycle share: tiny rules, snapshots, comparisons over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from freehold import AdamW, LayerwiseOptimizer, Muon
from freehold.plan.spec import RuleKind
from freehold.rules import orthogonal
from freehold.rules.base import Rule, Span, StateField, check_options, is_nonnegative


@dataclass(frozen=True, slots=True)
class PlainSGD(Rule):
    """``param -= lr * grad``: an update that a test can predict to the last bit."""

    lr: float = 1.0

    kind: ClassVar[RuleKind] = "elementwise"

    def __post_init__(self) -> None:
        self.validate(self.defaults())

    def state_fields(self, options: Mapping[str, Any] | None = None) -> tuple[StateField, ...]:
        return ()

    def validate(self, options: Mapping[str, Any]) -> None:
        check_options("PlainSGD", options, (("lr", is_nonnegative, "lr should be >= 0 but is: {}"),))

    @torch.no_grad()
    def update(self, span: Span, options: Mapping[str, Any]) -> None:
        span.param.add_(span.grad, alpha=-float(options["lr"]))


@dataclass(frozen=True, slots=True)
class PlainMatrixSGD(PlainSGD):
    """The same, for matrices."""

    kind: ClassVar[RuleKind] = "matrix"


def wrap(
    model: Any, *, lr: float = 0.02, adam_lr: float = 3e-3, weight_decay: float = 0.0, **options: Any
) -> LayerwiseOptimizer:
    """An optimizer with both rules and small buckets; options as for ``LayerwiseOptimizer``."""
    options.setdefault("matrix", Muon(lr=lr, weight_decay=weight_decay))
    options.setdefault("elementwise", AdamW(lr=adam_lr, weight_decay=weight_decay))
    options.setdefault("bucket_numel", 100)
    return LayerwiseOptimizer(model, **options)


class TorchPair:
    """torch.optim.Muon on the matrices and torch.optim.AdamW on the rest of a plain model: the reference."""

    def __init__(
        self,
        model: nn.Module,
        is_matrix: Callable[[str, nn.Parameter], bool] = lambda _, p: p.ndim == 2,
        *,
        lr: float = 0.02,
        adam_lr: float = 3e-3,
        weight_decay: float = 0.0,
    ) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if is_matrix(n, p)]
        rest = [p for n, p in named if not is_matrix(n, p)]
        self.optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay))
        if rest:
            self.optimizers.append(torch.optim.AdamW(rest, lr=adam_lr, weight_decay=weight_decay, foreach=False))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all params by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str = "") -> None:
    """Equal keys, and equal bits of every tensor (NaNs of equal place count as equal)."""
    assert list(found) == list(expected), what
    for name in found:
        same = torch.equal(found[name].nan_to_num(7.0), expected[name].nan_to_num(7.0))
        assert same, f"{what} {name!r} differs by {(found[name] - expected[name]).abs().max()}"


def everywhere(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_ranks_agree(model: nn.Module) -> None:
    """All params have the same bits on all ranks."""
    first, *others = everywhere(weights(model))
    for rank, other in enumerate(others, start=1):
        assert_same(other, first, f"rank {rank} against rank 0:")


def local_grads(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """The gradients of a loss by name, without touching ``p.grad``; of a plain (unwrapped) model."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, grads, strict=True))


def mean_over_ranks(grads: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The average over ranks, summed in rank order, an absent gradient as 0; ``None`` where no rank has one."""
    tables = everywhere(dict(grads))
    result: dict[str, Tensor | None] = {}
    for name in grads:
        present = [t[name] for t in tables if t[name] is not None]
        result[name] = None
        if present:
            total = torch.zeros_like(present[0])
            for table in tables:
                total = total + (table[name] if table[name] is not None else 0.0)
            result[name] = total / len(tables)
    return result


def reduced(opt: LayerwiseOptimizer, *, grouped: bool = True) -> dict[str, Tensor]:
    """The averaged gradients of all params, flattened, put together from all owners. Settles the window."""
    opt.clip_grad_norm_(3e38)
    pieces = [(name, start, grad.clone()) for name, start, grad in opt.reduced_grads()]
    everyone = everywhere(pieces) if grouped else [pieces]
    whole: dict[str, list[tuple[int, Tensor]]] = {}
    for name, start, grad in [piece for rank in everyone for piece in rank]:
        whole.setdefault(name, []).append((start, grad))
    return {name: torch.cat([g for _, g in sorted(parts, key=lambda x: x[0])]) for name, parts in whole.items()}


def snapshot(opt: LayerwiseOptimizer) -> dict[str, Tensor]:
    """Copies of all that a step changes on this rank: weights, masters, state, step counts."""
    opt.synchronize()
    found: dict[str, Tensor] = {"num_steps": torch.tensor([p.num_steps for p in opt._params])}
    for bucket in opt._buckets:
        memory = bucket.memory
        found[f"{bucket.index} weights"] = memory.weights.clone()
        found[f"{bucket.index} master"] = memory.master.clone()
        for name, tensor in memory.state.items():
            found[f"{bucket.index} {name}"] = tensor.clone()
    return found


def state_of(opt: LayerwiseOptimizer, name: str, field: str) -> Tensor | None:
    """This rank's part of a param's state, flattened; ``None`` if it owns nothing of it."""
    for bucket in opt._buckets:
        slots = [slot for slot in bucket.owned if slot.name == name]
        if slots:
            tensor = bucket.memory.master if field == "master" else bucket.memory.state[field]
            return torch.cat([tensor[s.offset : s.offset + s.numel] for s in slots]).clone()
    return None


def padding_is_zero(opt: LayerwiseOptimizer) -> bool:
    """Whether all elements of the buffers that belong to no param are 0 (gradients: of the own shard)."""
    for bucket in opt._buckets:
        real = torch.zeros(bucket.bucket.numel, dtype=torch.bool)
        for slot in bucket.bucket.slots:
            start = slot.rank * bucket.bucket.shard_numel + slot.offset
            real[start : start + slot.numel] = True
        shard = slice(opt._comm.rank * bucket.bucket.shard_numel, (opt._comm.rank + 1) * bucket.bucket.shard_numel)
        own_padding = bucket.grads.own[~real[shard][: bucket.grads.own.numel()]]
        if bool(bucket.memory.weights[~real].any()) or bool(own_padding.any()):
            return False
    return True


def poison_grads(opt: LayerwiseOptimizer, *, foreign_only: bool = False) -> None:
    """Put NaN where no rank may read: all of the params' gradient regions, or those in other ranks' shards."""
    for bucket in opt._buckets:
        for slot in bucket.bucket.slots:
            if foreign_only and slot.rank == opt._comm.rank:
                continue
            start = slot.rank * bucket.bucket.shard_numel + slot.offset
            bucket.grads.flat[start : start + slot.numel].fill_(float("nan"))


def launches(opt: LayerwiseOptimizer, kind: str = "reduce launched") -> list[int]:
    """The buckets of the recorded events of one kind, in order."""
    return [event.bucket for event in opt._log.events() if event.kind == kind]


@contextlib.contextmanager
def counting_newton_schulz() -> Iterator[list[int]]:
    """Count the matrices that this process orthogonalises; the list gets one number per call."""
    real, counts = orthogonal.pieces, []

    def counted(matrices: Tensor, *args: Any, **options: Any) -> Any:
        counts.append(len(matrices))
        return real(matrices, *args, **options)

    orthogonal.pieces = counted
    try:
        yield counts
    finally:
        orthogonal.pieces = real


def data(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers of their own generator, so that nothing else shifts them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error_of(function: Callable[[], Any]) -> tuple[str, str] | None:
    """Type name and text of what a call raises, or ``None``."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
