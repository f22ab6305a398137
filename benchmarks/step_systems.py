"""The systems that ``bench_step.py`` compares: those of the training example, and further public ones.

``zero-muon``      DistributedDataParallel and ZeroRedundancyOptimizer around torch.optim.Muon and AdamW.
``muon-fsdp2``     The PyPI package of that name: FSDP2, and a Muon that gathers each matrix on one rank.
``freehold-auto``  freehold with ``Muon(method="auto")``.
``freehold-sharded``  freehold with ``Muon(method="auto")`` and ``grad_memory="sharded"``.
``freehold-bfloat16-sums``  freehold with ``Muon(method="auto")`` and ``reduce_dtype=torch.bfloat16``, which is what
DistributedDataParallel does with bfloat16 gradients.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from freehold import LayerwiseOptimizer
from systems import OptimizerOptions, StateBytes, System, build_system, held_bytes, split_params, wrap_ddp

__all__ = [
    "LABELS",
    "SYSTEM_NAMES",
    "HeldBytes",
    "build",
    "default_systems",
    "knows_stacks",
    "measure_held_bytes",
    "why_unavailable",
]

LABELS = {
    "ddp-adamw": "DDP + torch.optim.AdamW",
    "ddp-muon": "DDP + torch.optim.Muon",
    "zero-muon": "DDP + ZeroRedundancyOptimizer(Muon)",
    "muon-fsdp2": "FSDP2 + muon-fsdp2",
    "freehold": 'freehold, method="standard"',
    "freehold-auto": 'freehold, method="auto"',
    "freehold-sharded": 'freehold, method="auto", grad_memory="sharded"',
    "freehold-bfloat16-sums": 'freehold, method="auto", reduce_dtype=torch.bfloat16',
}
SYSTEM_NAMES = tuple(LABELS)
_FREEHOLD: dict[str, dict[str, Any]] = {
    "freehold": {},
    "freehold-auto": {"method": "auto"},
    "freehold-sharded": {"method": "auto", "grad_memory": "sharded"},
    "freehold-bfloat16-sums": {"method": "auto", "reduce_dtype": torch.bfloat16},
}
"""Options of the systems that are freehold."""


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


def default_systems(dtype: torch.dtype, *, memory: bool) -> list[str]:
    """What is measured unless systems are asked for by name.

    Args:
        dtype: Of the weights. Sums in bfloat16 are for bfloat16 weights.
        memory: Peak memory, not time. Sharded gradients are about memory; what they cost in time is asked for by name.
    """
    left_out = set() if memory else {"freehold-sharded"}
    if dtype != torch.bfloat16:
        left_out.add("freehold-bfloat16-sums")
    return [name for name in SYSTEM_NAMES if name not in left_out]


def knows_stacks(name: str) -> bool:
    """Whether a system's optimizer takes stacks ``(E, M, N)``; ``torch.optim.Muon`` does not."""
    return name not in ("ddp-muon", "zero-muon")


def why_unavailable(name: str, *, float32_products: bool) -> str | None:
    """Why a system cannot run on this machine, or ``None``; the same on all ranks.

    Args:
        name: One of ``SYSTEM_NAMES``.
        float32_products: Bfloat16 products are to be replaced, which compiled code does not notice.
    """
    if name != "muon-fsdp2":
        return None
    if importlib.util.find_spec("muon_fsdp2") is None:
        return 'the package is not installed; pip install "freehold[bench]"'
    if float32_products:
        return "it runs compiled code, in which bfloat16 products cannot be replaced by float32 ones"
    compilers = (os.environ.get("CXX", ""), "g++", "clang++")
    if not any(compiler and shutil.which(compiler) for compiler in compilers):
        return "torch.compile, which it uses, finds no C++ compiler; install g++ or set CXX"
    return None


def build(name: str, model: nn.Module) -> System:
    """Wrap ``model``; every system has the same hyperparameters."""
    options = OptimizerOptions(matrix_lr=0.02, lr=3e-4, **_FREEHOLD.get(name, {}))
    if name == "zero-muon":
        return _build_zero(model, options)
    if name == "muon-fsdp2":
        return _build_fsdp2(model, options)
    if name in _FREEHOLD:
        return replace(build_system("freehold", model, options), name=name)
    return build_system(name, model, options)


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
    weights = sum(_local(param).nbytes for param in system.model.parameters())
    # Gradients are views of DDP's buckets, or FSDP's shards; both have the size of the weights.
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


def _build_fsdp2(model: nn.Module, options: OptimizerOptions) -> System:
    """Every block and the whole model through ``fully_shard``, the optimizer with the hyperparameters of the others.

    Weights stay gathered from forward to backward (``reshard_after_forward=False``): one collective less, and the other
    systems keep them too.
    """
    from muon_fsdp2 import Muon  # an optional package; why_unavailable looked for it

    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    matrices, others = split_params(model)  # after sharding, which replaces the Parameters
    norms = [param for name, param in others.items() if "norm" in name]
    decayed = [param for name, param in others.items() if "norm" not in name]
    adam: dict[str, Any] = {"use_muon": False, "lr": options.lr, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizer = Muon(
        [
            {
                "params": matrices,
                "use_muon": True,
                "lr": options.matrix_lr,
                "weight_decay": options.matrix_weight_decay,
                "rms_scale": False,
            },
            {"params": decayed, "weight_decay": options.weight_decay, **adam},
            {"params": norms, "weight_decay": 0.0, **adam},
        ]
    )

    def state_bytes() -> StateBytes:
        tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        return StateBytes(state_bytes=sum(_local(tensor).nbytes for tensor in tensors), master_bytes=0)

    return System(
        name="muon-fsdp2",
        model=model,
        forward=model,
        optimizers=(optimizer,),
        no_sync=nullcontext,
        clip_grad_norm=lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        settle=dist.barrier,
        close=lambda: None,
        state_bytes=state_bytes,
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
