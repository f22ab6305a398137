"""Where params come from: a config.json, safetensors files, a JSON list, inline shapes, a live module.

All reading of files is here; planning is pure. Nothing here imports torch or transformers until a source needs it.
"""

from freehold.sources.experts import experts_of_one_rank
from freehold.sources.inline import from_inline
from freehold.sources.listing import from_list
from freehold.sources.load import load_source
from freehold.sources.module import from_module
from freehold.sources.source import ListedParam, ModelSource, normal_dtype

__all__ = [
    "ListedParam",
    "ModelSource",
    "experts_of_one_rank",
    "from_inline",
    "from_list",
    "from_module",
    "load_source",
    "normal_dtype",
]
