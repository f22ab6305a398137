"""A model with one of everything, training that depends on step and rank alone, and all that a checkpoint must keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from cases import everywhere
from torch import Tensor, nn

import freehold
from freehold import AdamW, Group, LayerwiseOptimizer, Muon

VOCAB = 43


class Net(nn.Module):
    """Tied, stacked, convolved, normalised, frozen, never used, and of two dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 24)
        self.convolution = nn.Conv1d(24, 24, 3, padding=1)
        self.norm = nn.BatchNorm1d(24)
        self.up = nn.Parameter(torch.randn(4, 20, 24) / 5)
        self.down = nn.Parameter(torch.randn(4, 24, 20) / 5)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.dead = nn.Linear(8, 8)
        self.out = nn.Linear(24, 24)
        self.head = nn.Linear(24, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)
        self.norm.float()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.convolution(self.embedding(tokens).transpose(1, 2))
        x = self.norm(x.float()).to(x.dtype).transpose(1, 2)
        hidden = torch.einsum("bsi,eoi->bseo", x, self.up)
        x = x + torch.einsum("bseo,eio->bsi", F.gelu(hidden), self.down) + self.frozen(x)
        return self.head(self.out(x))


def make(dtype: torch.dtype = torch.float32, seed: int = 7) -> Net:
    """The model; another seed gives other weights, the frozen ones excepted."""
    torch.manual_seed(7)
    frozen = Net(dtype).frozen.state_dict()
    torch.manual_seed(seed)
    net = Net(dtype)
    net.frozen.load_state_dict(frozen)
    return net


def wrap(net: nn.Module, **options: Any) -> LayerwiseOptimizer:
    """Small buckets, so that there are several; two param groups of one rule."""
    options.setdefault("bucket_numel", 700)
    options.setdefault("matrix", Muon(lr=0.02, weight_decay=0.1))
    options.setdefault("elementwise", AdamW(lr=3e-3, weight_decay=0.1))
    options.setdefault("groups", [Group("*.bias", weight_decay=0.0)])
    return LayerwiseOptimizer(net, **options)


def train(net: nn.Module, opt: LayerwiseOptimizer, first: int, stop: int) -> None:
    """Steps ``first`` to ``stop``: each sees the same data whatever came before it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, stop):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(VOCAB, (2, 9), generator=generator)
        F.cross_entropy(net(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten()).backward()
        opt.step()
        opt.zero_grad()


def everything(net: nn.Module, opt: LayerwiseOptimizer) -> dict[str, Any]:
    """Weights, buffers, masters, state and step counters by name; checks that all ranks agree on them."""
    found: dict[str, Any] = {f"model {name}": t.clone() for name, t in net.state_dict().items()}
    state = opt.state_dict()["state"]
    found |= {f"{field} {name}": value for name, fields in state.items() for field, value in fields.items()}
    if dist.is_initialized():
        for rank, other in enumerate(everywhere(found)):
            own_statistics = {key for key in found if "running" in key}  # of each rank's own batches
            assert_equal({k: v for k, v in other.items() if k not in own_statistics}, found, f"rank {rank}")
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any], what: str = "") -> None:
    """Equal values and bits for every key of ``found``."""
    for key, value in found.items():
        other = expected[key]
        if isinstance(value, Tensor):
            assert (value.dtype, value.shape) == (other.dtype, other.shape), f"{what} {key}"
            same = torch.equal(value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        else:
            same = value == other
        assert same, f"{what} {key}: {value} != {other}"


def resign(path: Path, change: Any) -> None:
    """Edit a manifest and make its checksum right again: what a malicious author would do."""
    import hashlib

    top = json.loads((path / "manifest.json").read_text())
    change(top["body"])
    body = json.dumps(top["body"], sort_keys=True, separators=(",", ":"))
    top["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(top, sort_keys=True, separators=(",", ":")))


def saved(path: Path, num_steps: int = 2, **options: Any) -> tuple[Net, LayerwiseOptimizer]:
    """A one-rank run of a few steps, saved."""
    net = make()
    opt = wrap(net, **options)
    train(net, opt, 0, num_steps)
    freehold.save(path, net, opt, extra={"step": num_steps})
    return net, opt
