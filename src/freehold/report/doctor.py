"""``freehold doctor``: what is installed, what is missing and for what, and whether the planner works here."""

from __future__ import annotations

import importlib
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import freehold
from freehold.errors import FreeholdError
from freehold.plan.planner import plan
from freehold.plan.policies import policy_names
from freehold.plan.spec import ParamSpec

__all__ = ["Finding", "Status", "examine"]

Status = Literal["ok", "missing", "broken"]
"""``missing``: an optional part is not there. ``broken``: something that should work does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What.
        status: How it is.
        detail: A version, or what to do.
    """

    subject: str
    status: Status
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """An optional package: oldest version, what it is for, and the extra that brings it."""

    name: str
    oldest: tuple[int, ...]
    purpose: str
    extra: str


_PACKAGES = (
    _Package(name="torch", oldest=(2, 9), purpose="training, live modules and config.json", extra="torch"),
    _Package(name="numpy", oldest=(1, 26), purpose="torch", extra="torch"),
    _Package(name="transformers", oldest=(5,), purpose="config.json", extra="models"),
    _Package(name="safetensors", oldest=(0, 5), purpose="transformers", extra="models"),
    _Package(name="rich", oldest=(13, 7), purpose="the command line", extra="report"),
    _Package(name="typer", oldest=(0, 15), purpose="the command line", extra="report"),
    _Package(name="pillow", oldest=(11, 2), purpose="PNG pictures", extra="report"),
)
"""The optional dependencies of ``pyproject.toml``."""


def examine() -> Iterator[Finding]:
    """Look at everything, one thing at a time, so that a caller can show progress. Imports torch where it is there.

    Example:
        >>> next(examine()).subject
        'python'
    """
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    yield Finding(subject="python", status="ok", detail=detail)
    yield Finding(subject="freehold", status="ok", detail=freehold.__version__)
    yield _planner()
    for package in _PACKAGES:
        yield _installed(package)
    yield from _torch_facts()


def _planner() -> Finding:
    """Plan something small with every policy, and check the result."""
    params = [ParamSpec(name=f"layers.{index}", shape=(64 * (1 + index % 3), 64)) for index in range(32)]
    params.append(ParamSpec(name="norm", shape=(64,), rule="elementwise"))
    start_s = time.perf_counter()
    for policy in policy_names():
        try:
            problems = plan(params, num_ranks=4, bucket_numel=65536, policy=policy).problems()
        except FreeholdError as error:
            problems = [str(error)]
        if problems:
            return Finding(subject="planner", status="broken", detail=f"policy {policy}: {problems[0]}")
    elapsed_s = time.perf_counter() - start_s
    return Finding(subject="planner", status="ok", detail=f"{', '.join(policy_names())}: sound, {elapsed_s:.3f} s")


def _installed(package: _Package) -> Finding:
    try:
        found = version(package.name)
    except PackageNotFoundError:
        advice = f"for {package.purpose}: pip install 'freehold[{package.extra}]'"
        return Finding(subject=package.name, status="missing", detail=advice)
    if _release(found) < package.oldest:
        oldest = ".".join(map(str, package.oldest))
        return Finding(subject=package.name, status="broken", detail=f"{found} is too old: {oldest} or newer is needed")
    return Finding(subject=package.name, status="ok", detail=f"{found}, for {package.purpose}")


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    numbers: list[int] = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _torch_facts() -> Iterator[Finding]:
    try:
        version("torch")
    except PackageNotFoundError:
        return
    try:
        torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
        importlib.import_module("freehold.runtime")
    except (ImportError, OSError, RuntimeError) as error:  # a wheel for another processor, CUDA or Python
        yield Finding(subject="torch", status="broken", detail=f"import fails: {error}")
        return
    yield _devices(torch)
    backends = _backends(dist) if dist.is_available() else []
    status: Status = "ok" if backends else "broken"
    detail = ", ".join(backends) or "torch was built without torch.distributed: one rank only"
    yield Finding(subject="collectives", status=status, detail=detail)


def _devices(torch: Any) -> Finding:
    if not torch.cuda.is_available():
        return Finding(subject="accelerator", status="missing", detail="none: training works, on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    detail = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Finding(subject="accelerator", status="ok", detail=detail)


def _backends(dist: Any) -> list[str]:
    found = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    return [name for name, is_available in found.items() if is_available()]
