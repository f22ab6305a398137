"""One rank of ``bench_step.py``, which starts it; writes its measurements as JSON from rank 0."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from torch import Tensor

from bf16_products import Float32Products
from gpt import GPT, GPTConfig
from step_systems import SYSTEM_NAMES, build, measure_held_bytes
from systems import System


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What ``bench_step.py`` passes on."""

    systems: list[str]
    rounds: int
    steps: int
    split_steps: int
    width: int
    layers: int
    heads: int
    vocab: int
    seq_len: int
    batch_size: int
    native_bf16: bool
    output: Path


def main() -> None:
    """Measure, then leave the group."""
    options = _parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _measure(options)
    # Every DDP is gone by now. If one outlived the group, its C++ part would be the last to hold it, and destroy it
    # while holding the GIL, for which gloo's worker threads may be waiting: a deadlock (pytorch issue 56297).
    dist.destroy_process_group()


def _measure(options: WorkerOptions) -> None:
    """Build every system in this process, let them take turns, write what was measured."""
    before_bytes = _peak_resident_bytes()
    bench = _Bench(options)
    samples = [sample for index in range(options.rounds) for sample in bench.round(index)]
    held = {system.name: asdict(measure_held_bytes(system)) for system in bench.systems}
    of_all_ranks: list[object] = [None] * dist.get_world_size()
    growth_bytes = _peak_resident_bytes() - before_bytes
    dist.all_gather_object(of_all_ranks, {"held_bytes": held, "peak_growth_bytes": growth_bytes})
    if dist.get_rank() == 0:
        record = {"samples": samples, "ranks": of_all_ranks, "num_params": bench.num_params}
        options.output.write_text(json.dumps(record))
    for system in bench.systems:
        system.close()


class _Bench:
    """All systems side by side, each with a model of its own, equal at the start."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self.systems = [build(name, self._model()) for name in options.systems]
        self.num_params = sum(param.numel() for param in self.systems[0].model.parameters())
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = (options.batch_size, options.seq_len + 1)
        self._text = torch.randint(options.vocab, shape, generator=generator)
        for system in self.systems:
            self._steps(system, 1)  # state is allocated at the first step

    def round(self, index: int) -> Iterator[dict[str, object]]:
        """Every system once, beginning with another one in every round, so that drift of the machine hits all alike."""
        first = index % len(self.systems)
        for system in self.systems[first:] + self.systems[:first]:
            yield {"system": system.name, "round": index, "what": "step", "seconds": self._whole(system)}
            for what, seconds in self._split(system):
                yield {"system": system.name, "round": index, "what": what, "seconds": seconds}

    def _whole(self, system: System) -> float:
        """Seconds a step over a block of consecutive ones, up to the moment when all ranks have all new weights.

        Inside the block nothing waits: weights may be gathered under the next forward. Only the last step's gather is
        waited for, so that none runs on into the time of the next system.
        """
        dist.barrier()
        start_s = time.perf_counter()
        self._steps(system, self._options.steps)
        system.settle()
        dist.barrier()
        return (time.perf_counter() - start_s) / self._options.steps

    def _split(self, system: System) -> Iterator[tuple[str, float]]:
        """Forward and backward, then the optimizer until all ranks have all new weights, with barriers between."""
        for _ in range(self._options.split_steps):
            dist.barrier()
            start_s = time.perf_counter()
            self._backward(system)
            dist.barrier()
            middle_s = time.perf_counter()
            with self._products():
                system.step()
            system.settle()
            dist.barrier()
            stop_s = time.perf_counter()
            system.zero_grad()
            yield "backward", middle_s - start_s
            yield "optimizer", stop_s - middle_s

    def _steps(self, system: System, num_steps: int) -> None:
        for _ in range(num_steps):
            self._backward(system)
            with self._products():
                system.step()
            system.zero_grad()

    def _backward(self, system: System) -> None:
        _loss(system, self._text).backward()

    def _products(self) -> AbstractContextManager[object]:
        return nullcontext() if self._options.native_bf16 else Float32Products()

    def _model(self) -> GPT:
        torch.manual_seed(0)
        options = self._options
        return GPT(
            GPTConfig(vocab_size=options.vocab, width=options.width, num_layers=options.layers, num_heads=options.heads)
        )


def _loss(system: System, text: Tensor) -> Tensor:
    logits = system.forward(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def _peak_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _parse() -> WorkerOptions:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", nargs="+", choices=SYSTEM_NAMES, required=True)
    for name in ("rounds", "steps", "split-steps", "width", "layers", "heads", "vocab", "seq-len", "batch-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--native-bf16", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    return WorkerOptions(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
