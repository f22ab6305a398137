"""Whole-matrix optimizers (Muon and its kin) on many data-parallel ranks.

``freehold.plan`` decides which rank owns which matrix and needs nothing but Python;
``freehold.LayerwiseOptimizer`` trains with such a layout and needs PyTorch. Every name below is imported when
it is first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it for true; importing ``typing`` would double the import time

if TYPE_CHECKING:
    from freehold.errors import FreeholdError
    from freehold.plan.layout import Layout
    from freehold.plan.planner import plan
    from freehold.plan.spec import ParamSpec
    from freehold.rules import AdaMuon, AdamW, CostModel, Muon, NorMuon, TorchRule, newton_schulz
    from freehold.runtime import GradScaler, Group, LayerwiseOptimizer
    from freehold.runtime.checkpoint.folder import latest
    from freehold.runtime.checkpoint.full import full_optim_state_dict, full_state_dict
    from freehold.runtime.checkpoint.loading import load
    from freehold.runtime.checkpoint.saving import Saving, async_save, save
    from freehold.runtime.checkpoint.storage import CheckpointReader

__all__ = [
    "AdaMuon",
    "AdamW",
    "CheckpointReader",
    "CostModel",
    "FreeholdError",
    "GradScaler",
    "Group",
    "LayerwiseOptimizer",
    "Layout",
    "Muon",
    "NorMuon",
    "ParamSpec",
    "Saving",
    "TorchRule",
    "__version__",
    "async_save",
    "full_optim_state_dict",
    "full_state_dict",
    "latest",
    "load",
    "newton_schulz",
    "plan",
    "save",
]

__version__ = "0.1.0"

_HOME = {
    "AdaMuon": "freehold.rules",
    "AdamW": "freehold.rules",
    "CheckpointReader": "freehold.runtime.checkpoint.storage",
    "CostModel": "freehold.rules",
    "FreeholdError": "freehold.errors",
    "GradScaler": "freehold.runtime",
    "Group": "freehold.runtime",
    "LayerwiseOptimizer": "freehold.runtime",
    "Layout": "freehold.plan",
    "Muon": "freehold.rules",
    "NorMuon": "freehold.rules",
    "ParamSpec": "freehold.plan",
    "Saving": "freehold.runtime.checkpoint.saving",
    "TorchRule": "freehold.rules",
    "async_save": "freehold.runtime.checkpoint.saving",
    "full_optim_state_dict": "freehold.runtime.checkpoint.full",
    "full_state_dict": "freehold.runtime.checkpoint.full",
    "latest": "freehold.runtime.checkpoint.folder",
    "load": "freehold.runtime.checkpoint.loading",
    "newton_schulz": "freehold.rules",
    "save": "freehold.runtime.checkpoint.saving",
}


def __getattr__(name: str) -> object:
    if name == "plan":
        return import_module("freehold.plan")  # a subpackage that can be called
    if name not in _HOME:
        raise AttributeError(f"module 'freehold' has no attribute {name!r}")
    try:
        value: object = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"freehold.{name} needs PyTorch: pip install freehold[torch]") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
