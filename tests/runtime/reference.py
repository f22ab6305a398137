"""What freehold must equal: DistributedDataParallel with torch's own optimizers, or one process with fp32 masters."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import Tensor, nn

from freehold import AdamW, LayerwiseOptimizer, Muon


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Options of the two rules, for freehold and for torch alike."""

    weight_decay: float = 0.1
    nesterov: bool = True
    matrix_lr: float = 0.02
    elementwise_lr: float = 3e-3

    def rules(self) -> dict[str, Any]:
        return {
            "matrix": Muon(lr=self.matrix_lr, weight_decay=self.weight_decay, nesterov=self.nesterov),
            "elementwise": AdamW(lr=self.elementwise_lr, weight_decay=self.weight_decay),
        }

    def torch_optimizers(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        pairs = list(named)
        # Stacks have no counterpart in torch: a test that has some adds an optimizer for their slices.
        matrices = [p for name, p in pairs if models.is_matrix(name, p) and p.ndim == 2]
        rest = [p for name, p in pairs if not models.is_matrix(name, p)]
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            optimizers.append(
                torch.optim.Muon(matrices, lr=self.matrix_lr, weight_decay=self.weight_decay, nesterov=self.nesterov)
            )
        if rest:
            optimizers.append(torch.optim.AdamW(rest, lr=self.elementwise_lr, weight_decay=self.weight_decay))
        return optimizers


class DDPReference:
    """A copy of the model under DistributedDataParallel, torch.optim.Muon and torch.optim.AdamW."""

    def __init__(self, model: nn.Module, recipe: Recipe, group: Any = None, *, find_unused: bool = False) -> None:
        self.model = copy.deepcopy(model)
        self.ddp = nn.parallel.DistributedDataParallel(
            self.model, process_group=group, find_unused_parameters=find_unused
        )
        self.optimizers = recipe.torch_optimizers(self.model.named_parameters())

    def backward(self, inputs: tuple[Tensor, ...], *, sync: bool = True) -> None:
        with contextlib.nullcontext() if sync else self.ddp.no_sync(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # find_unused_parameters warns where all happen to be used
            models.loss_of(self.ddp, inputs).backward()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """As torch.nn.utils.clip_grad_norm_ does, by a norm that is given."""
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(coefficient)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class MasterReference:
    """One process that plays all ranks.

    The model is in low precision, gradients are summed in rank order, and torch's optimizers hold fp32 masters.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, num_ranks: int, reduce_dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model)
        self.num_ranks = num_ranks
        self.reduce_dtype = reduce_dtype
        self.masters = {name: nn.Parameter(p.detach().float()) for name, p in self.model.named_parameters()}
        self.optimizers = recipe.torch_optimizers(self.masters.items())
        self.grads: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]

    def backward(self, rank: int, inputs: tuple[Tensor, ...]) -> None:
        """One micro-batch of one rank; accumulates in the reduction dtype."""
        models.loss_of(self.model, inputs).backward()
        grads = self.grads[rank]
        for name, p in self.model.named_parameters():
            assert p.grad is not None, name
            new = p.grad.to(self.reduce_dtype)
            grads[name] = grads[name] + new if name in grads else new
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for name, master in self.masters.items():
            total = self.grads[0][name].clone()
            for grads in self.grads[1:]:
                total += grads[name]
            master.grad = total.div_(self.num_ranks).float()
        self.grads = [{} for _ in range(self.num_ranks)]
        for optimizer in self.optimizers:
            optimizer.step()
        for name, p in self.model.named_parameters():
            p.copy_(self.masters[name])


def full_grads(opt: LayerwiseOptimizer) -> dict[str, Tensor]:
    """The averaged gradients of all params, put together from their owners; collective, after ``clip_grad_norm_``."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    mine = [(name, start, piece.clone()) for name, start, piece in opt.reduced_grads()]
    pieces: list[Any] = [mine]
    if num_ranks > 1:
        pieces = [None] * num_ranks
        dist.all_gather_object(pieces, mine)
    grads = {p.name: torch.full((p.param.numel(),), float("nan"), dtype=p.grad_dtype) for p in opt._params}
    for name, start, piece in (item for of_rank in pieces for item in of_rank):
        grads[name][start : start + piece.numel()] = piece
    return {p.name: grads[p.name].view(p.param.shape) for p in opt._params}


def assert_equal_params(model: nn.Module, reference: nn.Module, context: object = "") -> None:
    """Bit for bit, every param by name."""
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        other = theirs[name]
        assert p.dtype == other.dtype, (name, p.dtype, other.dtype)
        assert torch.equal(p, other), f"{context}: {name} differs by up to {(p - other).abs().max()}"


def assert_equal_ranks(model: nn.Module, context: object = "") -> None:
    """Every rank holds the bits of rank 0. Collective."""
    mine = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(mine, theirs), f"{context}: this rank's weights differ from rank 0's"
