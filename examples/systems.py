"""Three ways to train the same model on several ranks, behind one small interface.

``freehold``    every matrix is updated by the one rank that owns it; gradients are reduce-scattered, weights gathered.
``ddp-muon``    DistributedDataParallel; every rank runs torch.optim.Muon over all matrices, and AdamW over the rest.
``ddp-adamw``   DistributedDataParallel and AdamW for everything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from freehold import AdamW, Group, LayerwiseOptimizer, Muon

__all__ = [
    "SYSTEM_NAMES",
    "OptimizerOptions",
    "StateBytes",
    "System",
    "build_system",
    "held_bytes",
    "split_params",
    "wrap_ddp",
]

SYSTEM_NAMES = ("freehold", "ddp-muon", "ddp-adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """What all systems are given alike.

    Attributes:
        matrix_lr: Learning rate of Muon.
        lr: Learning rate of AdamW.
        matrix_weight_decay: Decay of the matrices that Muon updates.
        weight_decay: Decay of what AdamW updates, but for norms and biases, which have none.
        method: How freehold's Muon orthogonalises matrices; the other systems have one way only.
        grad_memory: ``"full"`` or ``"sharded"``, for freehold.
        reduce_dtype: In which freehold sums gradients; DistributedDataParallel sums in that of the weights.
    """

    matrix_lr: float = 0.02
    lr: float = 3e-3
    matrix_weight_decay: float = 0.01
    weight_decay: float = 0.01
    method: str = "standard"
    grad_memory: Literal["full", "sharded"] = "full"
    reduce_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that one rank keeps between steps for the optimizer: momentum and moments, and fp32 masters if any."""

    state_bytes: int
    master_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A model ready to be trained.

    Attributes:
        name: One of ``SYSTEM_NAMES``.
        model: The bare model; to evaluate and to save.
        forward: What training calls: the model, or DDP around it.
        optimizers: Stepped and zeroed one after the other; each takes a scheduler.
        no_sync: Context for backward passes whose gradients only accumulate.
        clip_grad_norm: Scales the gradients to a total norm, returns the norm before, a 0-d tensor.
        settle: Returns when every rank has all its new weights.
        close: Lets go of hooks and communication.
        state_bytes: Measures what the optimizer keeps on this rank.
    """

    name: str
    model: nn.Module
    forward: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    no_sync: Callable[[], AbstractContextManager[None]]
    clip_grad_norm: Callable[[float], Tensor]
    settle: Callable[[], object]
    close: Callable[[], None]
    state_bytes: Callable[[], StateBytes]

    def step(self) -> None:
        """Update the weights from the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Start a new accumulation window."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def build_system(name: str, model: nn.Module, options: OptimizerOptions) -> System:
    """Wrap ``model`` for training on the ranks of the default process group.

    Args:
        name: One of ``SYSTEM_NAMES``.
        model: On its device, in its dtype, equal on all ranks.
        options: Learning rates and decays.
    """
    if name == "freehold":
        return _build_freehold(model, options)
    if name not in SYSTEM_NAMES:
        raise ValueError(f"unknown system {name!r}; known: {', '.join(SYSTEM_NAMES)}")
    matrices, others = split_params(model, matrix_rule=name == "ddp-muon")
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        muon = torch.optim.Muon(matrices, lr=options.matrix_lr, weight_decay=options.matrix_weight_decay)
        optimizers.append(muon)
    optimizers.append(torch.optim.AdamW(_adamw_groups(others), lr=options.lr, weight_decay=options.weight_decay))
    return wrap_ddp(name, model, tuple(optimizers))


def _build_freehold(model: nn.Module, options: OptimizerOptions) -> System:
    optimizer = LayerwiseOptimizer(
        model,
        matrix=Muon(lr=options.matrix_lr, weight_decay=options.matrix_weight_decay, method=options.method),
        elementwise=AdamW(lr=options.lr, weight_decay=options.weight_decay),
        groups=[Group("*norm*", weight_decay=0.0)],
        grad_memory=options.grad_memory,
        reduce_dtype=options.reduce_dtype,
    )

    def state_bytes() -> StateBytes:
        memory = optimizer.memory()
        return StateBytes(state_bytes=memory.state_bytes, master_bytes=memory.master_bytes)

    return System(
        name="freehold",
        model=model,
        forward=model,
        optimizers=(optimizer,),
        no_sync=optimizer.no_sync,
        clip_grad_norm=optimizer.clip_grad_norm_,
        settle=optimizer.synchronize,
        close=optimizer.close,
        state_bytes=state_bytes,
    )


def wrap_ddp(name: str, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> System:
    """The model in DistributedDataParallel, trained by optimizers that already hold its parameters."""
    device_ids = [torch.cuda.current_device()] if next(model.parameters()).is_cuda else None
    # Gradients live in DDP's buckets, as they do in freehold's, so that neither system holds them twice.
    ddp = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    return System(
        name=name,
        model=model,
        forward=ddp,
        optimizers=optimizers,
        no_sync=ddp.no_sync,
        clip_grad_norm=lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        settle=dist.barrier,
        close=lambda: None,
        state_bytes=lambda: StateBytes(state_bytes=sum(map(held_bytes, optimizers)), master_bytes=0),
    )


def split_params(model: nn.Module, *, matrix_rule: bool = True) -> tuple[list[nn.Parameter], dict[str, nn.Parameter]]:
    """The matrices inside the blocks, and everything else by name: embedding, head, norms, biases."""
    matrices: list[nn.Parameter] = []
    others: dict[str, nn.Parameter] = {}
    for name, param in model.named_parameters():
        if matrix_rule and param.ndim >= 2 and name.startswith("blocks."):
            matrices.append(param)
        else:
            others[name] = param
    return matrices, others


def _adamw_groups(params: dict[str, nn.Parameter]) -> list[dict[str, object]]:
    """Norms are not decayed; in the order of the model within each group."""
    norms = [param for name, param in params.items() if "norm" in name]
    decayed = [param for name, param in params.items() if "norm" not in name]
    return [{"params": decayed}, {"params": norms, "weight_decay": 0.0}]


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the state of a torch optimizer."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
