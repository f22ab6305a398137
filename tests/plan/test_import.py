"""Importing: instantly, without torch where no torch is needed, and under both meanings of ``freehold.plan``."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import freehold
import freehold.plan
import freehold.plan.layout
from freehold.plan import ParamSpec
from freehold.plan.planner import plan as plan_function

ROOT = Path(freehold.__file__).parents[1]
TORCH_SIDE = ("freehold.rules", "freehold.runtime", "freehold.integrations")


def python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def torch_free_modules() -> list[str]:
    """Every module that must work without torch, found in the file system so that nothing is imported for it."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted(ROOT.glob("freehold/**/*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.startswith(TORCH_SIDE)]


def test_plan_report_sources_and_cli_import_without_torch() -> None:
    modules = torch_free_modules()
    assert {"freehold", "freehold.errors", "freehold.plan.planner"} <= set(modules)
    imports = "\n".join(f"import {name}" for name in modules if name != "freehold.__main__")
    python(f"import sys\nsys.modules['torch'] = None\n{imports}\nassert sys.modules['torch'] is None")


def test_planning_needs_the_standard_library_only() -> None:
    script = (
        "import sys\n"
        "import freehold\n"
        "before = set(sys.modules)\n"
        "freehold.plan([freehold.ParamSpec(name='w', shape=(8, 8))], num_ranks=2).fingerprint()\n"
        "roots = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(roots - sys.stdlib_module_names - {'freehold'}))\n"
    )
    assert python(script) == "[]\n"


@pytest.mark.parametrize("name", ["LayerwiseOptimizer", "Group", "Muon", "AdamW", "newton_schulz"])
def test_a_name_that_needs_torch_says_so_when_torch_is_missing(name: str) -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import freehold\n"
        f"try:\n    freehold.{name}\n"
        "except ImportError as error:\n    print(error)\n"
    )
    assert python(script) == f"freehold.{name} needs PyTorch: pip install freehold[torch]\n"


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in freehold.__all__:
        assert getattr(freehold, name) is not None
        assert name in dir(freehold)
    with pytest.raises(AttributeError, match="module 'freehold' has no attribute 'Moun'"):
        _ = freehold.Moun  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_freehold_is_instant() -> None:
    """Processor time, so that a busy machine does not matter."""
    script = "import time\nstart = time.process_time()\nimport freehold\nprint(time.process_time() - start)"
    assert min(float(python(script)) for _ in range(3)) < 0.05


def test_freehold_plan_is_the_planner_and_the_subpackage() -> None:
    params = [ParamSpec(name="w", shape=(8, 8))]
    assert freehold.plan(params, num_ranks=2) == plan_function(params, num_ranks=2)
    assert freehold.plan.layout.Layout is freehold.Layout
    assert sys.modules["freehold.plan"] is freehold.plan
    assert inspect.signature(freehold.plan) == inspect.signature(plan_function)
    # In the other order too: a submodule is imported first, the name is used afterwards.
    script = (
        "import freehold.plan.layout\n"
        "import freehold\n"
        "spec = freehold.ParamSpec(name='w', shape=(8, 8))\n"
        "print(freehold.plan([spec], num_ranks=1).numel)\n"
    )
    assert python(script) == "128\n"


def test_the_version_is_the_one_of_the_distribution() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == freehold.__version__
