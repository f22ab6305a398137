"""Update rules: maths on local tensors, which know nothing of ranks, buckets or communication."""

from freehold.rules.adamuon import AdaMuon
from freehold.rules.adamw import AdamW
from freehold.rules.base import Block, Rule, Span, StateField
from freehold.rules.cost import CostModel
from freehold.rules.muon import Muon
from freehold.rules.newton_schulz import newton_schulz
from freehold.rules.normuon import NorMuon
from freehold.rules.polar.chooser import Calibration, calibration
from freehold.rules.torch_rule import TorchRule

__all__ = [
    "AdaMuon",
    "AdamW",
    "Block",
    "Calibration",
    "CostModel",
    "Muon",
    "NorMuon",
    "Rule",
    "Span",
    "StateField",
    "TorchRule",
    "calibration",
    "newton_schulz",
]
