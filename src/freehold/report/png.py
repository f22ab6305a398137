"""The static picture as PNG, painted by Pillow: it needs no browser, no system library and no font on the machine."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from freehold.report.colouring import TIMES
from freehold.report.drawing import Drawing
from freehold.report.palette import PADDING_LINE
from freehold.report.scene import Align, Box, Hatch, Line, Shape, Text, make_scene

__all__ = ["to_png"]

_ANCHORS: dict[Align, str] = {"start": "lm", "middle": "mm", "end": "rm"}

_DASH, _SPACE = 6.0, 3.0

_HATCH_PERIOD = 8


def to_png(drawing: Drawing, *, colour: str | None = None, width: int = 1600, scale: int = 2) -> bytes:
    """The picture as a PNG file.

    Args:
        drawing: What to show.
        colour: ``"role"``, ``"layer"`` or ``"shape"``; ``None`` chooses what tells most.
        width: Of the picture, before scaling.
        scale: Pixels of the file to a pixel of the picture, in both directions.

    Example:
        >>> from freehold.plan import ParamSpec, plan
        >>> from freehold.report.drawing import make_drawing
        >>> layout = plan([ParamSpec(name="w", shape=(64, 32))], num_ranks=2)
        >>> to_png(make_drawing([layout], title="one matrix"))[1:4]
        b'PNG'
    """
    scene = make_scene(drawing, colour=colour, width=width)
    image = Image.new("RGB", (scene.width * scale, scene.height * scale), "white")
    brush = _Brush(image=image, draw=ImageDraw.Draw(image), scale=scale, hatching=_hatching(image.size, scale))
    for shape in scene.shapes:
        _paint(shape, brush)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Brush:
    image: Image.Image
    draw: ImageDraw.ImageDraw
    scale: int
    hatching: Image.Image

    def area(self, shape: Box | Hatch) -> tuple[int, int, int, int]:
        """Whole pixels: neighbours that share an edge share it after rounding too."""
        left, top = round(shape.x * self.scale), round(shape.y * self.scale)
        return left, top, round((shape.x + shape.width) * self.scale), round((shape.y + shape.height) * self.scale)


def _paint(shape: Shape, brush: _Brush) -> None:
    match shape:
        case Box():
            left, top, right, bottom = brush.area(shape)
            if right > left and bottom > top:
                brush.draw.rectangle((left, top, right - 1, bottom - 1), fill=shape.fill)
        case Hatch():
            area = brush.area(shape)
            brush.image.paste(brush.hatching.crop(area), area[:2])
        case Line():
            _paint_line(shape, brush)
        case Text():
            _paint_text(shape, brush)


def _paint_line(line: Line, brush: _Brush) -> None:
    """All lines of the picture run across."""
    scale = brush.scale
    width = max(1, round(line.width * scale))
    top = round(line.y1 * scale - width / 2)
    x = line.x1
    while x < line.x2:
        stop = min(line.x2, x + _DASH) if line.dashed else line.x2
        brush.draw.rectangle((round(x * scale), top, round(stop * scale) - 1, top + width - 1), fill=line.colour)
        x = stop + _SPACE


def _paint_text(text: Text, brush: _Brush) -> None:
    font = _font(text.size * brush.scale)
    words = text.text.replace(TIMES, "x")  # the font that comes with Pillow has no multiplication sign
    stroke = 0.3 * brush.scale if text.bold else 0
    x, y = text.x * brush.scale, text.y * brush.scale
    if not text.upright:
        anchor = _ANCHORS[text.align]
        brush.draw.text((x, y), words, font=font, anchor=anchor, fill=text.colour, stroke_width=stroke)
        return
    size = (round(font.getlength(words)) + 4, round(1.6 * text.size * brush.scale))
    mask = Image.new("L", size, 0)
    ImageDraw.Draw(mask).text((size[0] / 2, size[1] / 2), words, font=font, anchor="mm", fill=255)
    turned = mask.transpose(Image.Transpose.ROTATE_90)
    at = (round(x - turned.width / 2), round(y - turned.height / 2))
    brush.image.paste(text.colour, (*at, at[0] + turned.width, at[1] + turned.height), turned)


@cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _hatching(size: tuple[int, int], scale: int) -> Image.Image:
    """The whole picture hatched; padding is cut out of it, so that the lines of neighbours meet."""
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for shift in range(0, sum(size), _HATCH_PERIOD * scale):
        draw.line((shift, 0, shift - size[1], size[1]), fill=PADDING_LINE, width=scale)
    return image
