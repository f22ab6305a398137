"""The static picture as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape

from freehold.report.drawing import Drawing
from freehold.report.palette import PADDING_LINE
from freehold.report.scene import Box, Hatch, Line, Shape, Text, make_scene

__all__ = ["to_svg"]

_FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


def to_svg(drawing: Drawing, *, colour: str | None = None, width: int = 1600) -> str:
    """The picture as an SVG document, with names as hints under the mouse.

    Args:
        drawing: What to show.
        colour: ``"role"``, ``"layer"`` or ``"shape"``; ``None`` chooses what tells most.
        width: Of the picture in pixels.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> from freehold.report.drawing import make_drawing
        >>> layout = plan([ParamSpec(name="w", shape=(64, 32))], num_ranks=2)
        >>> to_svg(make_drawing([layout], title="one matrix"))[:4]
        '<svg'
    """
    scene = make_scene(drawing, colour=colour, width=width)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scene.width}" height="{scene.height}" '
        f'viewBox="0 0 {scene.width} {scene.height}" font-family="{_FONT}" role="img">\n'
        f"<title>{escape(scene.title)}</title>\n"
        '<defs><pattern id="padding" width="8" height="8" patternUnits="userSpaceOnUse">'
        '<rect width="8" height="8" fill="#FFFFFF"/>'
        f'<path d="M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4" stroke="{PADDING_LINE}" stroke-width="1"/></pattern></defs>\n'
    )
    return head + "\n".join(_element(shape) for shape in scene.shapes) + "\n</svg>\n"


def _element(shape: Shape) -> str:
    match shape:
        case Box(hint=""):
            return f'<rect {_area(shape)} fill="{shape.fill}"/>'
        case Box():
            return f'<rect {_area(shape)} fill="{shape.fill}"><title>{escape(shape.hint)}</title></rect>'
        case Hatch():
            return f'<rect {_area(shape)} fill="url(#padding)"/>'
        case Line():
            dashes = ' stroke-dasharray="6 3"' if shape.dashed else ""
            return (
                f'<line x1="{_n(shape.x1)}" y1="{_n(shape.y1)}" x2="{_n(shape.x2)}" y2="{_n(shape.y2)}" '
                f'stroke="{shape.colour}" stroke-width="{_n(shape.width)}"{dashes}/>'
            )
        case Text():
            weight = ' font-weight="600"' if shape.bold else ""
            turn = f' transform="rotate(-90 {_n(shape.x)} {_n(shape.y)})"' if shape.upright else ""
            return (
                f'<text x="{_n(shape.x)}" y="{_n(shape.y)}" font-size="{_n(shape.size)}" fill="{shape.colour}" '
                f'text-anchor="{shape.align}" dominant-baseline="central" pointer-events="none"{weight}{turn}>'
                f"{escape(shape.text)}</text>"
            )


def _area(shape: Box | Hatch) -> str:
    # Crisp edges would show seams of half a pixel between columns; at two decimals neighbours share their edges.
    return f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
