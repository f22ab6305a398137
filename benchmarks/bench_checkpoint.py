"""What saving costs training: blocks of steps with one ``async_save`` each against blocks without, in turn.

    torchrun --nproc-per-node 2 benchmarks/bench_checkpoint.py

The model and the batches are those of the demo (examples/train_gpt.py). Also timed: ``save``, ``load``, ``verify``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import freehold
from gpt import GPT, GPTConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="in a block")
    parser.add_argument("--blocks", type=int, default=6, help="of each kind")
    parser.add_argument("--width", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = GPTConfig(width=options.width, num_layers=4, num_heads=4, fused_qkv=False, tied_head=False)
    model = GPT(config)
    opt = freehold.LayerwiseOptimizer(model, matrix=freehold.Muon(), elementwise=freehold.AdamW())
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    _report(model, opt, Path(folder[0]), options)
    opt.close()
    dist.destroy_process_group()


def _report(model: GPT, opt: freehold.LayerwiseOptimizer, folder: Path, options: argparse.Namespace) -> None:
    _block(model, opt, 10)
    with_save, without, calls = list[float](), list[float](), list[float]()
    for index in range(options.blocks):
        begin = time.perf_counter()
        calls.append(_timed(lambda index=index: freehold.async_save(folder / str(index), model, opt, keep=2)))
        _block(model, opt, options.steps)
        with_save.append(time.perf_counter() - begin)
        freehold.load(folder / str(index), model, opt)  # waits; the next block competes with nothing
        without.append(_timed(lambda: _block(model, opt, options.steps)))
    saves = [_timed(lambda i=i: freehold.save(folder / f"s{i}", model, opt, keep=2)) for i in range(5)]
    loads = [_timed(lambda: freehold.load(folder / "s4", model, opt)) for _ in range(5)]
    verifies = [_timed(opt.verify) for _ in range(5)]
    ratios = [a / b for a, b in zip(with_save, without, strict=True)]
    if dist.get_rank() == 0:
        size = sum(file.stat().st_size for file in (folder / "s4").iterdir())
        print(f"checkpoint of {size:,} bytes; {options.steps} steps take {statistics.median(without):.2f} s")
        print(f"with one async_save: x{statistics.median(ratios):.3f} (rounds: {[round(r, 3) for r in ratios]})")
        for name, found in {"async_save call": calls, "save": saves, "load": loads, "verify": verifies}.items():
            print(f"{name}: {1000 * statistics.median(found):.1f} ms")


def _block(model: GPT, opt: freehold.LayerwiseOptimizer, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(num_steps):
        tokens = torch.randint(256, (4, 257), generator=generator)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
