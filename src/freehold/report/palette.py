"""Colours that colour-blind people can tell apart, and which text can be read on them."""

from __future__ import annotations

__all__ = ["NO_STEP", "OKABE_ITO", "OTHER", "PADDING_LINE", "graded", "ink_on"]

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Seven hues, far apart first, that stay apart with every common colour blindness: Okabe and Ito, "Color Universal
Design" (2008), https://jfly.uni-koeln.de/color/; their black is left to text."""

OTHER = "#4C4C4C"
"""What belongs to no class of its own: a grey that is darker than all of them, for their purple may look grey too."""

NO_STEP = "#DDDDDD"
"""What has no place on the scale of ``graded``, in whose middle there is a darker grey."""

PADDING_LINE = "#8C8C8C"
"""Hatching of padding, on white; nothing else is hatched."""

_CIVIDIS = (
    "#00204D",
    "#00336F",
    "#39486B",
    "#575C6D",
    "#707173",
    "#8A8779",
    "#A69D75",
    "#C4B56C",
    "#E4CF5B",
    "#FFEA46",
)
"""Ten steps of cividis, whose lightness rises evenly and which looks alike with and without colour blindness: Nunez,
Anderton and Renslow, PLoS ONE 13 (2018), https://doi.org/10.1371/journal.pone.0199239."""


def graded(count: int) -> tuple[str, ...]:
    """``count`` colours from dark to light.

    Example:
        >>> graded(2)
        ('#00204d', '#ffea46')
    """
    last = len(_CIVIDIS) - 1
    colours: list[str] = []
    for i in range(count):
        place = last * i / (count - 1) if count > 1 else 0.0
        low = min(int(place), last - 1)
        pairs = zip(_channels(_CIVIDIS[low]), _channels(_CIVIDIS[low + 1]), strict=True)
        colours.append("#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in pairs))
    return tuple(colours)


def ink_on(colour: str) -> str:
    """Black or white: whichever has more contrast with ``colour`` (WCAG 2.2, relative luminance).

    Example:
        >>> ink_on("#0072B2"), ink_on("#F0E442")
        ('#FFFFFF', '#000000')
    """
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
