"""A small decoder-only transformer: everything the training example and the benchmarks need of a model, on one page.

Pre-norm blocks, rotary positions, causal attention through ``F.scaled_dot_product_attention``, a GELU MLP, no dropout.
Query, key and value are separate ``Linear`` layers: Newton-Schulz orthogonalises a matrix as a whole, and the three
are three different maps. ``GPTConfig(fused_qkv=True)`` makes them one ``(3 x width, width)`` matrix instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from torch import Tensor, nn

__all__ = ["GPT", "GPTConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        vocab_size: Rows of the embedding and outputs of the head; 256 for bytes.
        width: Size of the residual stream.
        num_layers: Transformer blocks.
        num_heads: Attention heads; must divide ``width`` into heads of even size.
        mlp_width: Hidden size of the MLP; ``None`` means ``4 * width``.
        fused_qkv: One matrix for query, key and value instead of three.
        tied_head: The output head is the embedding itself.

    Example:
        >>> GPTConfig(width=64, num_heads=2).head_width
        32
    """

    vocab_size: int = 256
    width: int = 192
    num_layers: int = 4
    num_heads: int = 4
    mlp_width: int | None = None
    fused_qkv: bool = False
    tied_head: bool = False

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads):
            raise ValueError(f"width={self.width} must be a multiple of 2 * num_heads={2 * self.num_heads}")

    @property
    def head_width(self) -> int:
        """Size of one attention head."""
        return self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        """``mlp_width`` with its default filled in."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width


class GPT(nn.Module):
    """The model: token indices ``(batch, seq)`` to logits ``(batch, seq, vocab_size)``.

    Example:
        >>> model = GPT(GPTConfig(vocab_size=11, width=16, num_layers=1, num_heads=2))
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 11])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Normal weights of size 0.02; what writes into the residual stream is smaller the deeper the model (GPT-2)."""
        for name, param in self.named_parameters():
            if param.ndim == 2:
                writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                std = 0.02 / math.sqrt(2 * self.config.num_layers) if writes_residual else 0.02
                nn.init.normal_(param, std=std)

    def get_output_embeddings(self) -> nn.Linear:
        """The output head, under the name that Hugging Face models use; freehold keeps it out of Muon."""
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict every next token.

        Args:
            tokens: Token indices, ``(batch, seq)`` int64.

        Returns:
            Logits, ``(batch, seq, vocab_size)`` in the dtype of the weights.
        """
        x = self.embedding(tokens)
        cos, sin = _rotary_table(tokens.shape[1], self.config.head_width, like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.final_norm(x))


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class _Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.fused = config.fused_qkv
        if self.fused:
            self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        else:
            self.query = nn.Linear(config.width, config.width, bias=False)
            self.key = nn.Linear(config.width, config.width, bias=False)
            self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(x).chunk(3, dim=-1) if self.fused else (self.query(x), self.key(x), self.value(x))
        # (batch, seq, width) -> (batch, heads, seq, head_width)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in qkv)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden_width, bias=False)
        self.down = nn.Linear(config.hidden_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _rotary_table(seq_len: int, head_width: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(seq_len, head_width / 2)`` (https://arxiv.org/abs/2104.09864, with its base of 10,000).

    Computed at every forward, in fp32 whatever ``like`` is: cheap beside a block, and the model has no buffers.
    """
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=like.device)
    positions = torch.arange(seq_len, dtype=torch.float32, device=like.device)
    angles = torch.outer(positions, 10_000.0 ** (-pairs / head_width))
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head as pairs: ``(batch, heads, seq, head_width)``, same dtype out."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
