"""The systems that ``bench_step.py`` compares: those of the training example, and ZeroRedundancyOptimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from freehold import LayerwiseOptimizer
from systems import OptimizerOptions, StateBytes, System, build_system, held_bytes, split_params, wrap_ddp

__all__ = ["SYSTEM_NAMES", "HeldBytes", "build", "measure_held_bytes"]

SYSTEM_NAMES = ("ddp-adamw", "ddp-muon", "zero-muon", "freehold")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes that one rank keeps between steps, padding included."""

    weights: int
    gradients: int
    masters: int
    state: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.masters + self.state


def build(name: str, model: nn.Module) -> System:
    """Wrap ``model``; every system has the same hyperparameters."""
    options = OptimizerOptions(matrix_lr=0.02, lr=3e-4)
    return _build_zero(model, options) if name == "zero-muon" else build_system(name, model, options)


def measure_held_bytes(system: System) -> HeldBytes:
    """From the tensors themselves, after at least one step."""
    optimizer = system.optimizers[0]
    if isinstance(optimizer, LayerwiseOptimizer):
        memory = optimizer.memory()
        return HeldBytes(
            weights=memory.param_bytes,
            gradients=memory.grad_bytes,
            masters=memory.master_bytes,
            state=memory.state_bytes,
        )
    weights = sum(param.numel() * param.element_size() for param in system.model.parameters())
    # Gradients are views of DDP's buckets, which have the size of the weights.
    return HeldBytes(weights=weights, gradients=weights, masters=0, state=system.state_bytes().state_bytes)


def _build_zero(model: nn.Module, options: OptimizerOptions) -> System:
    """DDP with both optimizers sharded over the ranks param by param; weights are sent by their owners in ``step``."""
    matrices, others = split_params(model)
    muon = ZeroRedundancyOptimizer(
        matrices,
        optimizer_class=torch.optim.Muon,
        parameters_as_bucket_view=True,
        lr=options.matrix_lr,
        weight_decay=options.matrix_weight_decay,
    )
    adamw = ZeroRedundancyOptimizer(
        list(others.values()),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=options.lr,
        weight_decay=options.weight_decay,
    )

    def state_bytes() -> StateBytes:
        return StateBytes(state_bytes=held_bytes(muon.optim) + held_bytes(adamw.optim), master_bytes=0)

    return replace(wrap_ddp("zero-muon", model, (muon, adamw)), state_bytes=state_bytes)
