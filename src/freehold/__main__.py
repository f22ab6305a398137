"""``freehold`` and ``python -m freehold``: starts the command line, or says what it lacks."""

from __future__ import annotations

import sys
from importlib import import_module

__all__ = ["main"]


def main() -> None:
    """Run the command line; one clear line where its packages are not installed."""
    try:
        cli = import_module("freehold.cli")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"freehold: the command line needs {package}, which is not installed: pip install 'freehold[report]'",
            file=sys.stderr,
        )
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
