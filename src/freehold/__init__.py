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
    from freehold.rules import AdamW, Muon, newton_schulz
    from freehold.runtime import Group, LayerwiseOptimizer

__all__ = [
    "AdamW",
    "FreeholdError",
    "Group",
    "LayerwiseOptimizer",
    "Layout",
    "Muon",
    "ParamSpec",
    "__version__",
    "newton_schulz",
    "plan",
]

__version__ = "0.1.0"

_HOME = {
    "AdamW": "freehold.rules",
    "FreeholdError": "freehold.errors",
    "Group": "freehold.runtime",
    "Layout": "freehold.plan",
    "LayerwiseOptimizer": "freehold.runtime",
    "Muon": "freehold.rules",
    "ParamSpec": "freehold.plan",
    "newton_schulz": "freehold.rules",
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
