"""Which colour a param gets: by its role, its layer or its shape, with the legend to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freehold.plan.spec import ParamSpec
from freehold.report.palette import NO_STEP, OKABE_ITO, OTHER, graded
from freehold.report.roles import OTHER_ROLE, ROLES, layer_of, role_of

__all__ = ["TIMES", "Colouring", "Swatch", "make_colourings", "shape_text"]

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swatch:
    """One entry of a legend.

    Attributes:
        label: What it stands for.
        code: A short label for blocks, so that colour is never alone; may be empty.
        colour: ``#RRGGBB``.
    """

    label: str
    code: str
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Colouring:
    """One way to colour params.

    Attributes:
        name: ``"role"``, ``"layer"`` or ``"shape"``.
        swatches: The legend.
        of_param: For each param the index of its swatch.
        graded: The swatches are steps of a scale, not names.
    """

    name: str
    swatches: tuple[Swatch, ...]
    of_param: tuple[int, ...]
    graded: bool = False


def make_colourings(params: Sequence[ParamSpec]) -> tuple[Colouring, ...]:
    """The ways to colour params: by role first, or by shape first where names tell nothing about most elements."""
    roles, layers, shapes = _by_role(params), _by_layer(params), _by_shape(params)
    known = sum(spec.numel for spec in params if role_of(spec) is not OTHER_ROLE)
    if 2 * known < sum(spec.numel for spec in params):
        return (shapes, layers, roles)
    return (roles, layers, shapes)


_ROLE_COLOURS = {
    "qkv": OKABE_ITO[0],
    "out": OKABE_ITO[4],
    "up": OKABE_ITO[5],
    "down": OKABE_ITO[1],
    "e.up": OKABE_ITO[2],
    "e.down": OKABE_ITO[3],
    "emb": OKABE_ITO[6],
}


def _by_role(params: Sequence[ParamSpec]) -> Colouring:
    found = [role_of(spec) for spec in params]
    present = [role for role in (*reversed(ROLES), OTHER_ROLE) if role in found]
    return Colouring(
        name="role",
        swatches=tuple(
            Swatch(label=role.label, code=role.code, colour=_ROLE_COLOURS.get(role.code, OTHER)) for role in present
        ),
        of_param=tuple(present.index(role) for role in found),
    )


def _by_layer(params: Sequence[ParamSpec]) -> Colouring:
    found = [layer_of(spec) for spec in params]
    layers = sorted({layer for layer in found if layer is not None})
    place = {layer: i for i, layer in enumerate(layers)}
    swatches = [
        Swatch(label=f"layer {layer}", code=str(layer), colour=colour)
        for layer, colour in zip(layers, graded(len(layers)), strict=True)
    ]
    if None in found:
        swatches.append(Swatch(label="in no layer", code="", colour=NO_STEP))
    return Colouring(
        name="layer",
        swatches=tuple(swatches),
        of_param=tuple(len(layers) if layer is None else place[layer] for layer in found),
        graded=True,
    )


def _by_shape(params: Sequence[ParamSpec]) -> Colouring:
    """The shapes that hold most elements get colours of their own."""
    numels: dict[tuple[int, ...], int] = {}
    for spec in params:
        numels[spec.shape] = numels.get(spec.shape, 0) + spec.numel
    ranked = sorted(numels, key=lambda shape: (-numels[shape], shape))
    named = ranked[: len(OKABE_ITO)]
    swatches = [
        Swatch(label=shape_text(shape), code=shape_text(shape), colour=colour)
        for shape, colour in zip(named, OKABE_ITO, strict=False)
    ]
    rest = len(ranked) - len(named)
    if rest:
        label = "1 other shape" if rest == 1 else f"{rest} other shapes"
        swatches.append(Swatch(label=label, code="", colour=OTHER))
    place = {shape: i for i, shape in enumerate(named)}
    return Colouring(
        name="shape",
        swatches=tuple(swatches),
        of_param=tuple(place.get(spec.shape, len(named)) for spec in params),
    )


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it.

    Example:
        >>> len(shape_text((8, 64, 32))), shape_text(())
        (7, 'scalar')
    """
    return TIMES.join(map(str, shape)) if shape else "scalar"
