"""Update rules: maths on local tensors, which know nothing of ranks, buckets or communication."""

from freehold.rules.adamw import AdamW
from freehold.rules.base import Block, Rule, Span, StateField
from freehold.rules.muon import Muon
from freehold.rules.newton_schulz import newton_schulz

__all__ = ["AdamW", "Block", "Muon", "Rule", "Span", "StateField", "newton_schulz"]
