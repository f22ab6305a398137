"""A model under freehold on every rank, and the averaged gradients that it should have."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from reference import assert_equal_ranks, full_grads
from torch import Tensor, nn

from freehold import AdamW, LayerwiseOptimizer, Muon


class World:
    """One optimizer and its model; ``check`` ends a window."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(2)
        self.dtype = dtype
        self.model = nn.Sequential(
            nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 5)
        ).to(dtype)
        self.opt = LayerwiseOptimizer(self.model, matrix=Muon(lr=0.02), elementwise=AdamW(lr=1e-2), bucket_numel=1)
        assert len(self.opt.layout.buckets) >= 4

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def batch(self, number: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + number)
        return torch.randn(6, 9, generator=generator).to(self.dtype)

    def loss(self, number: int) -> Tensor:
        return self.model(self.batch(number, self.rank)).float().square().mean()

    def backward(self, number: int, *, sync: bool = True) -> None:
        with contextlib.nullcontext() if sync else self.opt.no_sync():
            self.loss(number).backward()

    def local_grads(self, number: int, rank: int) -> dict[str, Tensor]:
        twin = self.plain_copy()
        twin(self.batch(number, rank)).float().square().mean().backward()
        return {name: p.grad.float() for name, p in twin.named_parameters()}

    def plain_copy(self) -> nn.Module:
        self.opt.synchronize()
        twin = nn.Sequential(*(copy.deepcopy(layer) for layer in self.model))
        for p in twin.parameters():
            p.grad = None
        return twin

    def mean(self, *numbers: int, scale: float = 1.0) -> dict[str, Tensor]:
        """The sum over these batches, averaged over the ranks."""
        total: dict[str, Tensor] = {}
        for rank in range(dist.get_world_size()):
            for number in numbers:
                for name, grad in self.local_grads(number, rank).items():
                    total[name] = total.get(name, 0) + grad * (scale / dist.get_world_size())
        return total

    def check(self, expected: dict[str, Tensor], unused: Iterable[str] = ()) -> None:
        """The reduced gradients are these, and a step with them moves what it should; then a new window begins."""
        self.opt.clip_grad_norm_(1e30)
        grads = full_grads(self.opt)
        for name, grad in expected.items():
            torch.testing.assert_close(
                grads[name], grad, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.opt.step()
        self.opt.synchronize()
        still = {name for name, p in self.model.named_parameters() if torch.equal(p, before[name])}
        assert still == set(unused), f"unchanged: {still}"
        assert_equal_ranks(self.model)

    def plain_step(self, number: int) -> None:
        """One ordinary step, which must be right whatever happened before."""
        expected = self.mean(number)
        self.backward(number)
        self.check(expected)
        self.opt.zero_grad()
