"""Pictures by the name of the file that they go to."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from freehold.errors import PlanError, SourceError
from freehold.report.drawing import Drawing
from freehold.report.html import to_html
from freehold.report.svg import to_svg

__all__ = ["PICTURES", "Painter", "painter_for"]

Painter = Callable[[Drawing], bytes]
"""Turns a drawing into the contents of a file."""


def _html(drawing: Drawing) -> bytes:
    return to_html(drawing).encode()


def _svg(drawing: Drawing) -> bytes:
    return to_svg(drawing).encode()


def _png(drawing: Drawing) -> bytes:
    try:
        png = import_module("freehold.report.png")  # the only one that needs a package, Pillow
    except ModuleNotFoundError as error:
        raise SourceError(f"PNG needs Pillow: pip install 'freehold[report]' ({error})") from error
    return cast("Painter", png.to_png)(drawing)


PICTURES: dict[str, Painter] = {".html": _html, ".svg": _svg, ".png": _png}
"""By suffix. The page is interactive and needs no network; the others are static."""


def painter_for(path: Path) -> Painter:
    """What can paint a file of this name.

    Raises:
        PlanError: Its suffix is none of ``PICTURES``.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> from freehold.report.drawing import make_drawing
        >>> layout = plan([ParamSpec(name="w", shape=(64, 32))], num_ranks=2)
        >>> painter_for(Path("layout.svg"))(make_drawing([layout], title="one matrix"))[:4]
        b'<svg'
    """
    painter = PICTURES.get(path.suffix.lower())
    if painter is None:
        raise PlanError(f"a picture goes to a file that ends in {', '.join(PICTURES)}; got {str(path)!r}")
    return painter
