"""A Hugging Face ``config.json``: the model is built on the meta device, so that names and shapes are the real ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from freehold.errors import SourceError
from freehold.sources.module import from_module, imported
from freehold.sources.source import ModelSource, normal_dtype

__all__ = ["from_config"]

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
"""What model families call the number of experts that a token passes."""


def from_config(record: Mapping[str, object], *, path: Path) -> ModelSource:
    """The params of the model that a configuration describes; nothing is downloaded, no weights are made.

    Args:
        record: What ``config.json`` holds.
        path: Where it came from, for the name and for messages.

    Returns:
        The params in the configuration's dtype (bfloat16 if it names none).

    Raises:
        SourceError: transformers or torch is missing, does not know the architecture, or rejects the values.
    """
    name = path.parent.resolve().name if path.name == "config.json" else path.name
    with _no_collections():
        imported("torch", extra="torch,models")
        model = _built_model(imported("transformers", extra="torch,models"), record, path)
    source = from_module(model, name=f"{type(model).__name__} ({name})")
    experts = next((record[key] for key in _EXPERTS_PER_TOKEN if type(record.get(key)) is int), None)
    dtype = record.get("dtype") or record.get("torch_dtype") or "bfloat16"
    source = replace(source, experts_per_token=experts if isinstance(experts, int) else None)
    return source.with_dtype(normal_dtype(str(dtype)))


@contextmanager
def _no_collections() -> Iterator[None]:
    """Importing torch and transformers makes millions of objects that stay; looking through them takes 2 s of 10."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _built_model(transformers: Any, record: Mapping[str, object], path: Path) -> Any:
    torch = imported("torch", extra="torch,models")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        config = _config(transformers, record, path)
        model_class = _model_class(transformers, record, config, path)
        with torch.device("meta"):
            return model_class(config)
    except SourceError:
        raise
    except Exception as error:  # whatever a model's own code makes of wrong values
        reason = next(iter(str(error).splitlines()), "")
        raise SourceError(f"{path}: transformers cannot build this model: {type(error).__name__}: {reason}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)


def _config(transformers: Any, record: Mapping[str, object], path: Path) -> Any:
    model_type = record.get("model_type")
    if not isinstance(model_type, str):
        raise SourceError(f"{path}: no model_type, so it is no Hugging Face config.json")
    known = imported("transformers.models.auto.configuration_auto", extra="torch,models").CONFIG_MAPPING
    if model_type not in known:
        own_code = "; its own code (auto_map) is never run" if "auto_map" in record else ""
        raise SourceError(
            f"{path}: unknown architecture {model_type!r}: transformers {transformers.__version__} has none of that "
            f"name{own_code}. Upgrade transformers, or give a .safetensors file or a list of shapes"
        )
    return known[model_type].from_dict(dict(record))


def _model_class(transformers: Any, record: Mapping[str, object], config: Any, path: Path) -> Any:
    """The class that the configuration names; without one, the language model, else the bare model."""
    named = record.get("architectures")
    if isinstance(named, list) and named:
        found = getattr(transformers, str(named[0]), None)
        if found is None:
            raise SourceError(
                f"{path}: unknown architecture {named[0]!r}: transformers {transformers.__version__} has no such model"
            )
        return found
    auto = imported("transformers.models.auto.modeling_auto", extra="torch,models")
    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise SourceError(f"{path}: names no architectures, and transformers has no default for {config.model_type!r}")
