"""One rank of ``bench_step.py``, which starts it; writes its measurements as JSON from rank 0."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that PyTorch's own documentation uses
from torch import Tensor

from bf16_products import Float32Products, measure_products
from gpt import GPT
from step_memory import PeakMemory
from step_models import CASES, Case
from step_systems import SYSTEM_NAMES, build, knows_stacks, measure_held_bytes, why_unavailable
from systems import System


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What ``bench_step.py`` passes on."""

    case: str
    systems: list[str]
    rounds: int
    seconds: float
    steps: int
    split_steps: int
    quick: bool
    alone: bool
    products: str
    output: Path


def main() -> None:
    """Measure, then leave the group."""
    options = _parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _measure(options)
    # A DDP that outlives the group destroys it while holding the GIL, for which gloo's worker threads may be waiting:
    # a deadlock (pytorch issue 56297), or, at the end of the interpreter, an abort. Collect what is left of it.
    gc.collect()
    dist.destroy_process_group()


def _measure(options: WorkerOptions) -> None:
    """Build every system in this process, let them take turns, write what was measured."""
    products = _agree_on_products(options.products)
    reasons = {name: why_unavailable(name, float32_products=products["used"] == "float32") for name in options.systems}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    bench = _Bench(options, [name for name in options.systems if name not in missing], products["used"] == "float32")
    samples = list(bench.samples())
    held = {system.name: asdict(measure_held_bytes(system)) for system in bench.systems}
    mine = {"held_bytes": held, "started_s": bench.started_s, "peak_growth_bytes": bench.peak.growth_bytes()}
    of_all_ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, mine)
    if dist.get_rank() == 0:
        record = {"case": options.case, "samples": samples, "ranks": of_all_ranks, "unavailable": missing}
        options.output.write_text(json.dumps(record | {"num_params": bench.num_params, "products": products}))
    for system in bench.systems:
        system.close()


def _agree_on_products(wanted: str) -> dict[str, object]:
    """Which bfloat16 products are used, and the flop/s that rank 0 measured; the same on all ranks."""
    rates = measure_products()
    used = wanted if wanted != "auto" else "float32" if rates.needs_substitute else "native"
    decided: list[object] = [{"used": used, "flops_per_s": asdict(rates)}]
    dist.broadcast_object_list(decided)
    agreed = decided[0]
    assert isinstance(agreed, dict), f"{agreed=}"
    return agreed


class _Bench:
    """All systems side by side, each with a model of its own, equal at the start."""

    def __init__(self, options: WorkerOptions, names: list[str], float32_products: bool) -> None:
        self._options = options
        self._case: Case = CASES[options.case]
        self._float32_products = float32_products
        sizes = self._case.quick_sizes if options.quick else self._case.sizes
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._text = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.seq_len + 1), generator=generator)
        if not options.alone:
            self._warm_up(names[0])
        self.peak = PeakMemory()
        self.started_s: dict[str, float] = {}
        self.systems = [self._start(name) for name in names]
        self.num_params = sum(param.numel() for param in self.systems[0].model.parameters())
        for system in self.systems:
            self._steps(system, 1)  # DDP orders its buckets anew after the first one
            system.settle()  # what freehold watches reads with is gone again, and does not slow down the others

    def samples(self) -> Iterator[dict[str, object]]:
        """So many rounds, and further ones until the seconds are used up."""
        stop_s, index = time.perf_counter() + self._options.seconds, 0
        while index < self._options.rounds or _same_everywhere(time.perf_counter() < stop_s):
            yield from self._round(index)
            index += 1

    def _round(self, index: int) -> Iterator[dict[str, object]]:
        """Every system once, beginning with another one in every round, so that drift of the machine hits all alike."""
        first = index % len(self.systems)
        for system in self.systems[first:] + self.systems[:first]:
            yield {"system": system.name, "round": index, "what": "step", "seconds": self._whole(system)}
            for what, seconds in self._split(system):
                yield {"system": system.name, "round": index, "what": what, "seconds": seconds}

    def _warm_up(self, name: str) -> None:
        """What is made once a process (kernels, modules that optimizers import) is not charged to the first system."""
        model = self._model(name)
        _loss(model, self._text).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def _start(self, name: str) -> System:
        """Build a system and take its first step, with the seconds of both together."""
        model = self._model(name)
        dist.barrier()
        start_s = time.perf_counter()
        system = build(name, model)
        self._steps(system, 1)
        system.settle()
        dist.barrier()
        self.started_s[name] = time.perf_counter() - start_s
        return system

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
            with self._products(in_model=False):
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
            with self._products(in_model=False):
                system.step()
            system.zero_grad()

    def _backward(self, system: System) -> None:
        with self._products(in_model=True):
            _loss(system.forward, self._text).backward()

    def _products(self, *, in_model: bool) -> AbstractContextManager[object]:
        """A float32 model has no bfloat16 products: it is spared what the substitute costs every operation."""
        needed = self._float32_products and not (in_model and self._case.dtype == torch.float32)
        return Float32Products() if needed else nullcontext()

    def _model(self, system: str) -> GPT:
        torch.manual_seed(0)
        return self._case.build(quick=self._options.quick, knows_stacks=knows_stacks(system))


def _same_everywhere(flag: bool) -> bool:
    """What rank 0 says."""
    decided = torch.tensor([flag], dtype=torch.uint8)
    dist.broadcast(decided, src=0)
    return bool(decided)


def _loss(forward: torch.nn.Module, text: Tensor) -> Tensor:
    logits = forward(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def _parse() -> WorkerOptions:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEM_NAMES, required=True)
    for name in ("rounds", "steps", "split-steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--alone", action="store_true", help="one system, to measure its peak memory")
    parser.add_argument("--products", choices=("auto", "native", "float32"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    return WorkerOptions(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
