"""Small models that the runtime is tested on, and which of their params are matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from torch import Tensor, nn

VOCAB = 43


def mlp() -> nn.Sequential:
    """Odd sizes on purpose: no param fills a multiple of the alignment, and shard edges cut vectors."""
    return nn.Sequential(
        nn.Linear(33, 65),
        nn.GELU(),
        nn.LayerNorm(65),
        nn.Linear(65, 40, bias=False),
        nn.GELU(),
        nn.Linear(40, 7),
    )


def chain(num_layers: int = 6, width: int = 16) -> nn.Sequential:
    """Layers in a row, every other one with a bias."""
    torch.manual_seed(11)
    return nn.Sequential(*(nn.Linear(width, width, bias=i % 2 == 0) for i in range(num_layers)))


def chain_inputs(rank: int, width: int = 16) -> Tensor:
    """What goes into a ``chain``, different on every rank."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(30 + rank))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class TinyGPT(nn.Module):
    """Tokens ``(batch, seq)`` to logits; learned positions; the head tied to the embedding, or not."""

    def __init__(self, *, tied: bool, width: int = 24, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        # The table is read outside its own module's forward, as many models do.
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SeparateExperts(nn.Module):
    """A mixture of experts, one module each: an expert without tokens does not run at all."""

    def __init__(self, num_experts: int = 4, width: int = 12, hidden: int = 20) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(num_experts))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(num_experts))
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor, expert_of: Tensor) -> Tensor:
        x = self.first(x)
        mixed = torch.zeros_like(x)
        for expert in expert_of.unique().tolist():
            chosen = expert_of == expert
            mixed[chosen] = self.down[expert](F.gelu(self.up[expert](x[chosen])))
        return self.last(x + mixed)


class StackedExperts(nn.Module):
    """The same with all experts in two stacks ``(E, out, in)``: an expert without tokens gets a gradient of zeros."""

    def __init__(self, num_experts: int = 4, width: int = 12, hidden: int = 20) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.up = nn.Parameter(torch.randn(num_experts, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden) / hidden**0.5)
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor, expert_of: Tensor) -> Tensor:
        x = self.first(x)
        mixed = torch.zeros_like(x)
        for expert in expert_of.unique().tolist():
            chosen = expert_of == expert
            mixed[chosen] = F.linear(F.gelu(F.linear(x[chosen], self.up[expert])), self.down[expert])
        return self.last(x + mixed)


def make(kind: str) -> nn.Module:
    """A model by name, the same on every rank."""
    torch.manual_seed(7)
    match kind:
        case "mlp":
            return mlp()
        case "gpt":
            return TinyGPT(tied=False)
        case "gpt_tied":
            return TinyGPT(tied=True)
        case "separate":
            return SeparateExperts()
        case "stacked":
            return StackedExperts()
    raise ValueError(kind)


def is_matrix(name: str, param: nn.Parameter) -> bool:
    """What torch.optim.Muon should have, told by hand: independent of the routing under test."""
    return param.ndim >= 2 and not name.startswith(("embedding", "positions", "head"))


def batch(kind: str, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Inputs for one forward of ``make(kind)``."""
    if kind.startswith("gpt"):
        return (torch.randint(VOCAB, (2, 9), generator=generator),)
    return (torch.randn(8, 33, generator=generator).to(dtype),)


def loss_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """A scalar that depends on every param that the inputs reach."""
    outputs = model(*inputs)
    if inputs[0].dtype == torch.int64:
        return F.cross_entropy(outputs.flatten(0, 1).float(), inputs[0].roll(-1, 1).flatten())
    return outputs.float().square().mean()
