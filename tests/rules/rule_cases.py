"""The rules and variants that the conformance tests run over: a new one is one row in ``CASES``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon  # the oracle has no public name

from freehold.rules import AdaMuon, AdamW, Muon, NorMuon, Rule, TorchRule


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rule, the optimizer that it must agree with, and the shapes to try it on.

    ``tolerance`` is 0 where bits must agree, else the relative norm of what may differ.
    """

    make: Callable[..., Rule]
    oracle: Callable[..., torch.optim.Optimizer]
    options: tuple[dict[str, Any], ...]
    bad_options: tuple[dict[str, Any], ...] = ()
    shapes: tuple[tuple[int, ...], ...]
    tolerance: float = 0.0
    bears_names_of_torch: bool = False
    is_exact_alone: bool = True


class _EvenedReference(torch.optim.Optimizer):
    """NorMuon and AdaMuon as their papers write them, matrix by matrix, without any of our code."""

    is_by_row: bool

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "beta2": 0.95,
            "nesterov": self.is_by_row,
            "eps": 1e-8,
            "adjust_lr_fn": None,
            "sign": not self.is_by_row,
        }
        super().__init__(params, {**defaults, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
        buffer.lerp_(param.grad, 1 - group["momentum"])  # rounded as by torch: bfloat16 enlarges the rest
        direction = buffer
        if group["nesterov"]:
            direction = param.grad.lerp(buffer, group["momentum"])
        if group["sign"]:
            direction = direction.sign()
        ortho = torch_muon._zeropower_via_newtonschulz(direction, (3.4445, -4.775, 2.0315), 5, 1e-7).to(param.dtype)
        square = ortho**2
        measured = square.mean(1, keepdim=True) if self.is_by_row else square
        second = state.setdefault("second", torch.zeros_like(measured))
        second.mul_(group["beta2"]).add_((1 - group["beta2"]) * measured)
        evened = ortho / (second**0.5 + group["eps"])
        rows, cols = param.shape
        if group["adjust_lr_fn"] in (None, "match_rms_adamw"):
            norm = 0.2 * math.sqrt(rows * cols)
        else:
            ratio = max(1, rows / cols) if group["adjust_lr_fn"] == "original" else rows / cols
            norm = math.sqrt(ratio) * ortho.norm()
        lr = float(group["lr"])
        update = evened * norm / evened.norm()
        param.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)


class NorMuonReference(_EvenedReference):
    is_by_row = True


class AdaMuonReference(_EvenedReference):
    is_by_row = False


MATRICES = ((7, 13), (33, 65), (64, 64), (64, 64), (16, 105), (40, 16), (1, 9), (9, 1), (64, 64), (128, 32))
ELEMENTS = ((7, 13), (1,), (63,), (64,), (65,), (5, 3, 2), (1000,), (33, 65))

BAD_MUON: tuple[dict[str, Any], ...] = (
    {"lr": -1.0},
    {"lr": float("nan")},
    {"lr": torch.ones(2)},
    {"lr": "0.1"},
    {"momentum": -0.1},
    {"weight_decay": -0.1},
    {"nesterov": "no"},
    {"ns_coefficients": (1.0, 2.0)},
    {"ns_coefficients": 3.0},
    {"ns_coefficients": "quintic"},
    {"ns_coefficients": ((1.0, 2.0, 3.0), (1.0, 2.0))},
    {"eps": -1e-7},
    {"ns_steps": 100},
    {"ns_steps": 2.5},
    {"adjust_lr_fn": "rms"},
    {"method": "polar"},
    {"ns_dtype": "int8"},
    {"max_batch_bytes": 0},
    {"max_batch_bytes": 1.5},
    {"split": 0},
    {"split": (3, 0)},
    {"split": True},
    {"split": [1, 2]},
    {"split_scale": (-1.0,)},
    {"split_scale": ()},
    {"lr_scale": -1.0},
    {"cautious": 1},
)

EVENED_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.02, "weight_decay": 0.0, "beta2": 0.5},
    {"adjust_lr_fn": "original", "momentum": 0.8, "eps": 1e-4},
    {"adjust_lr_fn": "spectral", "nesterov": True},
    {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
)

CASES = {
    "muon": Case(
        make=Muon,
        oracle=torch.optim.Muon,
        options=(
            {},
            {"nesterov": False, "lr": 0.02},
            {"weight_decay": 0.0, "adjust_lr_fn": "original"},
            {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.9},
            {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "momentum": 0.0},
        ),
        bad_options=BAD_MUON,
        shapes=MATRICES,
        bears_names_of_torch=True,
    ),
    "muon-gram": Case(
        make=partial(Muon, method="gram"),
        oracle=torch.optim.Muon,
        options=({}, {"nesterov": False, "lr": 0.02}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}),
        shapes=MATRICES,
        tolerance=0.06,  # bfloat16 on both sides: 0.01 to 0.03 each (docs/newton_schulz.md)
        is_exact_alone=False,
    ),
    "muon-gram-float32": Case(
        make=partial(Muon, method="gram", ns_dtype="float32"),
        oracle=torch.optim.Muon,
        options=({}, {"momentum": 0.0, "weight_decay": 0.3}),
        shapes=MATRICES,
        tolerance=0.05,
        is_exact_alone=False,
    ),
    "muon-auto": Case(
        make=partial(Muon, method="auto"),
        oracle=torch.optim.Muon,
        options=({}, {"momentum": 0.8}),
        shapes=MATRICES,
        tolerance=0.06,
        is_exact_alone=False,
    ),
    "normuon": Case(
        make=NorMuon,
        oracle=NorMuonReference,
        options=EVENED_OPTIONS,
        bad_options=(*BAD_MUON, {"beta2": 1.0}, {"beta2": 0}),
        shapes=MATRICES,
        tolerance=1e-4,
    ),
    "adamuon": Case(
        make=AdaMuon,
        oracle=AdaMuonReference,
        options=(*EVENED_OPTIONS, {"sign": False}),
        bad_options=(*BAD_MUON, {"beta2": 1.0}, {"sign": 0}),
        shapes=MATRICES,
        tolerance=1e-4,
    ),
    "torch-muon": Case(
        make=partial(TorchRule, torch.optim.Muon),
        oracle=torch.optim.Muon,
        options=({}, {"nesterov": False, "lr": 0.02}, {"weight_decay": 0.0, "adjust_lr_fn": "original"}),
        bad_options=({"lr": -1.0}, {"momentum": -0.1}, {"weight_decay": -0.1}, {"adjust_lr_fn": "rms"}),
        shapes=MATRICES,
    ),
    "torch-adamw": Case(
        make=partial(TorchRule, torch.optim.AdamW, foreach=False),
        oracle=partial(torch.optim.AdamW, foreach=False),
        options=({}, {"lr": 0.1, "betas": (0.8, 0.95), "amsgrad": True}),
        bad_options=({"lr": -1.0}, {"eps": -1e-8}),
        shapes=MATRICES,
    ),
    "adamw": Case(
        make=AdamW,
        oracle=torch.optim.AdamW,
        options=(
            {},
            {"lr": 0.1, "betas": (0.8, 0.95)},
            {"weight_decay": 0.0, "eps": 1e-3},
            {"betas": (0.0, 0.0), "weight_decay": 0.5},
        ),
        bad_options=(
            {"lr": -1.0},
            {"lr": float("nan")},
            {"lr": torch.ones(2)},
            {"betas": (0.9, 1.0)},
            {"betas": (-0.1, 0.9)},
            {"betas": (0.9,)},
            {"betas": 0.9},
            {"eps": -1e-8},
            {"weight_decay": -0.1},
            {"lr_scale": -1.0},
        ),
        shapes=ELEMENTS,
        bears_names_of_torch=True,
    ),
}
