"""Checkpoints of a run: weights and optimizer by freehold, and beside them what else it takes to go on bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import freehold
from freehold import LayerwiseOptimizer

__all__ = ["Progress", "resume", "save"]

_KEPT = 2  # checkpoints; older ones are removed


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run has come.

    Batches depend on seed, step and rank alone, so the step is all that the data order needs.

    Attributes:
        losses: Of every step so far, on this rank.
    """

    losses: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return len(self.losses)


def save(
    folder: Path, model: nn.Module, opt: LayerwiseOptimizer, schedulers: Sequence[LRScheduler], progress: Progress
) -> None:
    """Start a checkpoint of this moment and return: training goes on while it is written."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (progress.losses, torch.get_rng_state()))
    extra = {"ranks": of_ranks, "schedulers": [scheduler.state_dict() for scheduler in schedulers]}
    freehold.async_save(folder / f"step-{progress.num_steps:06d}", model, opt, extra=extra, keep=_KEPT)


def resume(folder: Path, model: nn.Module, opt: LayerwiseOptimizer, schedulers: Sequence[LRScheduler]) -> Progress:
    """Go back to the newest complete checkpoint, if there is one.

    With another number of ranks than it was saved with, weights and optimizer are the same, but the batches are others.
    """
    path = freehold.latest(folder)
    if path is None:
        return Progress()
    extra = freehold.load(path, model, opt)
    for scheduler, state in zip(schedulers, extra["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    losses, random_state = extra["ranks"][dist.get_rank() % len(extra["ranks"])]
    torch.set_rng_state(random_state)
    return Progress(losses=losses)
