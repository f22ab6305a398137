"""What a param is for, guessed from its name: for colours only, nothing depends on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from freehold.plan.spec import ParamSpec

__all__ = ["OTHER_ROLE", "ROLES", "Role", "layer_of", "role_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A class of params.

    Attributes:
        label: What a legend says.
        code: What a block says.
        pattern: The first role whose pattern is found in a param's name is its role.
    """

    label: str
    code: str
    pattern: re.Pattern[str]


def _role(label: str, code: str, pattern: str) -> Role:
    return Role(label=label, code=code, pattern=re.compile(pattern))


ROLES = (
    _role("embedding, head", "emb", r"embed|\bwte\b|\bwpe\b|lm_head|\bhead\b|unembed"),
    _role("norm, bias, router", "misc", r"norm|\bln_|bias$|\bsinks\b|router|\.gate\.weight$|\bgate$"),
    _role("expert down", "e.down", r"experts.*(down|w2|fc2)"),
    _role("expert up, gate", "e.up", r"experts"),
    _role(
        "attention out", "out", r"\bo_proj|out_proj|attn\.c_proj|attn.*\bdense\b|\bwo\b|attention\.proj\b|linear_proj"
    ),
    _role(
        "attention in (q, k, v)",
        "qkv",
        r"[qkv]_\w*proj|qkv|c_attn|query|key|value|\bw[qkv]\b|query_key_value|in_proj|[qkv]_[ab]_proj",
    ),
    _role("mlp down", "down", r"down_proj|mlp\.c_proj|\bfc2\b|\bw2\b|linear_fc2|4h_to_h|\bfc_out\b"),
    _role("mlp up, gate", "up", r"up_proj|gate_proj|c_fc|\bfc1\b|\bw[13]\b|linear_fc1|h_to_4h|\bfc_in\b|\bmlp\b"),
)
"""In the order in which they are tried. Expert and shared roles stand before the general ones whose names they hold."""

OTHER_ROLE = _role("other", "", "")

_LAYER = re.compile(r"\.(\d+)(?=\.|$)")


def role_of(spec: ParamSpec) -> Role:
    """The role of a param.

    Example:
        >>> role_of(ParamSpec(name="model.layers.3.mlp.experts.down_proj", shape=(8, 64, 32))).label
        'expert down'
        >>> role_of(ParamSpec(name="matrix.3", shape=(64, 32))).label
        'other'
    """
    return _role_of_name(_LAYER.sub(".0", spec.name.lower()))


@cache
def _role_of_name(name: str) -> Role:
    """Layers and experts differ by number alone, so that a model of 45,000 params has some ten names."""
    return next((role for role in ROLES if role.pattern.search(name)), OTHER_ROLE)


def layer_of(spec: ParamSpec) -> int | None:
    """The first number among the parts of the name.

    Example:
        >>> layer_of(ParamSpec(name="model.layers.3.mlp.experts.1.w2", shape=(64, 32)))
        3
    """
    found = _LAYER.search("." + spec.name)
    return int(found.group(1)) if found else None
