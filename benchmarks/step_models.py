"""The models that ``bench_step.py`` trains, by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpt import GPT, GPTConfig
from moe import ExpertsConfig, moe_gpt

__all__ = ["CASES", "Case", "Sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large a model is and how much it is given at once.

    Attributes:
        width: Size of the residual stream.
        num_layers: Blocks.
        num_heads: Attention heads.
        vocab_size: Rows of the embedding.
        num_experts: Experts in every block, 0 for a dense MLP.
        ffn_width: Hidden size of an expert.
        seq_len: Tokens of a sequence.
        batch_size: Sequences of one rank.
    """

    width: int
    num_layers: int
    num_heads: int
    vocab_size: int = 8192
    num_experts: int = 0
    ffn_width: int = 0
    seq_len: int = 128
    batch_size: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in one dtype.

    Attributes:
        title: For headings.
        sizes: Of the model that is measured.
        quick_sizes: Of a small one, to see that everything works.
        dtype: Of the weights.
        stacked: Whether experts are stacks ``(E, M, N)``, for the systems that take those.
    """

    title: str
    sizes: Sizes
    quick_sizes: Sizes
    dtype: torch.dtype
    stacked: bool = False

    def build(self, *, quick: bool, knows_stacks: bool) -> GPT:
        """The model, in its dtype; seed before.

        Args:
            quick: The small one.
            knows_stacks: Whether the system takes stacks; if not, it gets the experts as separate matrices.
        """
        sizes = self.quick_sizes if quick else self.sizes
        config = GPTConfig(
            vocab_size=sizes.vocab_size, width=sizes.width, num_layers=sizes.num_layers, num_heads=sizes.num_heads
        )
        if not sizes.num_experts:
            return GPT(config).to(self.dtype)
        experts = ExpertsConfig(
            num_experts=sizes.num_experts, ffn_width=sizes.ffn_width, stacked=self.stacked and knows_stacks
        )
        return moe_gpt(config, experts).to(self.dtype)


_GPT = Sizes(width=512, num_layers=8, num_heads=8)
_QUICK_GPT = Sizes(width=128, num_layers=2, num_heads=4, vocab_size=512, seq_len=64)
_MOE = Sizes(width=256, num_layers=4, num_heads=4, num_experts=16, ffn_width=192)
_QUICK_MOE = Sizes(
    width=64, num_layers=2, num_heads=2, vocab_size=512, num_experts=8, ffn_width=48, seq_len=64, batch_size=2
)

CASES: dict[str, Case] = {}
for _dtype, _label in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
    CASES[f"gpt-{_label}"] = Case(title=f"GPT, {_label}", sizes=_GPT, quick_sizes=_QUICK_GPT, dtype=_dtype)
    for _stacked, _form in ((False, "separate"), (True, "stacks")):
        CASES[f"moe-{_form}-{_label}"] = Case(
            title=f"MoE, experts as {'stacks' if _stacked else 'separate matrices'}, {_label}",
            sizes=_MOE,
            quick_sizes=_QUICK_MOE,
            dtype=_dtype,
            stacked=_stacked,
        )
