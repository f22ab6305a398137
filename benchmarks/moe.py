"""A mixture-of-experts GPT: the example's GPT with the MLP of every block replaced by routed experts.

The experts' weights are separate 2-D params (one pair of ``Linear`` an expert), or two stacks ``(E, M, N)`` a block.
Every expert takes part in autograd at every step, if need be with no tokens and so with a gradient of zeros: all params
then have gradients on all ranks, and DDP needs no ``find_unused_parameters``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from torch import Tensor, nn

from gpt import GPT, GPTConfig

__all__ = ["ExpertsConfig", "MixtureOfExperts", "moe_gpt"]

_STD = 0.02  # as the example's GPT initialises its matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The routed part of every block.

    Attributes:
        num_experts: How many.
        ffn_width: Hidden size of one expert.
        top_k: Experts per token.
        stacked: Whether their weights are two stacks ``(E, M, N)`` instead of ``2 E`` matrices.
    """

    num_experts: int = 16
    ffn_width: int = 192
    top_k: int = 2
    stacked: bool = False


def moe_gpt(config: GPTConfig, experts: ExpertsConfig) -> GPT:
    """A GPT whose MLPs are mixtures of experts.

    Example:
        >>> sizes = GPTConfig(vocab_size=11, width=16, num_layers=1, num_heads=2)
        >>> model = moe_gpt(sizes, ExpertsConfig(num_experts=4, ffn_width=8, stacked=True))
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 11])
        >>> {name: tuple(p.shape) for name, p in model.named_parameters() if ".mlp." in name}
        {'blocks.0.mlp.up': (4, 8, 16), 'blocks.0.mlp.down': (4, 16, 8), 'blocks.0.mlp.router.weight': (4, 16)}
    """
    model = GPT(config)
    for block in model.blocks:
        block.mlp = MixtureOfExperts(config.width, experts)
    return model


class MixtureOfExperts(nn.Module):
    """Each token goes through the experts that its router scores highest, weighted by their scores."""

    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.num_experts, bias=False)
        nn.init.normal_(self.router.weight, std=_STD)
        up, down = (
            torch.randn(config.num_experts, *shape) * _STD
            for shape in ((config.ffn_width, width), (width, config.ffn_width))
        )
        if config.stacked:
            self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        else:
            self.experts = nn.ModuleList(_Expert(*pair) for pair in zip(up, down, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, seq, width)`` -> the same, any floating dtype."""
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).float().softmax(-1).topk(self.config.top_k)
        order = chosen.flatten().argsort(stable=True)  # by expert: its tokens lie together
        counts = chosen.flatten().bincount(minlength=self.config.num_experts).tolist()
        rows = order // self.config.top_k
        found = torch.cat(self._through_experts(tokens[rows].split(counts)))
        weighted = found * scores.flatten()[order].unsqueeze(-1).to(found.dtype)
        return torch.zeros_like(tokens).index_add(0, rows, weighted).view_as(x)

    def _through_experts(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        if not self.config.stacked:
            return [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        # unbind, not indexing: its backward writes the gradient of the stack once.
        weights = zip(parts, self.up.unbind(), self.down.unbind(), strict=True)
        return [F.linear(F.gelu(F.linear(part, up)), down) for part, up, down in weights]


class _Expert(nn.Module):
    """``down(gelu(up(x)))``; also of no tokens at all, ``(0, width)``."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up = _linear(up)
        self.down = _linear(down)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear
