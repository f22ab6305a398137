"""Live modules and config.json: real names and shapes, and the runtime's own routing."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from freehold.errors import FreeholdError, SourceError
from freehold.plan import ParamSpec
from freehold.runtime.routing import named_params_of, route
from freehold.sources import ListedParam, ModelSource, from_module, load_source
from freehold.sources.routing import route_listed

DATA = Path(__file__).parents[1] / "data"
QWEN = DATA / "qwen3-30b-a3b" / "config.json"


class Toy(nn.Module):
    """An embedding tied to a head, a stack, a convolution, a norm and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.conv = nn.Conv2d(3, 16, (5, 7))
        self.experts = nn.Parameter(torch.zeros(4, 8, 16))
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_a_live_module_is_routed_as_the_runtime_routes_it() -> None:
    model = Toy()
    source = from_module(model)
    module, trainable, _ = named_params_of(model)
    expected = {route.named.name: (route.kind, route.planned_shape) for route in route(module, trainable, [])}
    untied = {spec.name: (spec.rule, spec.shape) for spec in source.params if spec.tied_to is None}
    assert untied == expected
    assert untied["conv.weight"] == ("matrix", (16, 105))
    assert untied["embed.weight"][0] == "elementwise"
    assert [(spec.name, spec.tied_to) for spec in source.params if spec.tied_to] == [("head.weight", "embed.weight")]
    assert source.name == "Toy"
    assert source.notes == ("2 frozen params are left out.",)


def test_a_module_on_the_meta_device_is_read_all_the_same() -> None:
    with torch.device("meta"):
        model = Toy().to(torch.bfloat16)
    source = from_module(model)
    assert {spec.dtype for spec in source.params} == {"bfloat16"}
    assert source.params == from_module(Toy().to(torch.bfloat16)).params


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(FreeholdError, match=r"expected an nn\.Module"):
        from_module(torch.zeros(3))


def test_the_runtimes_doubts_become_notes() -> None:
    model = nn.Sequential(nn.Embedding(8, 8))
    model.add_module("first", nn.Linear(8, 8))
    model.add_module("second", nn.Linear(8, 8))
    (note,) = from_module(model).notes
    assert "cannot be told" in note


def test_a_config_gives_the_names_and_shapes_that_are_on_record() -> None:
    source = load_source(str(QWEN))
    on_record = json.loads(gzip.decompress((DATA / "zoo" / "qwen3-30b-a3b.json.gz").read_bytes()))
    assert [[spec.name, list(spec.shape)] for spec in source.params] == on_record
    assert {spec.dtype for spec in source.params} == {"bfloat16"}
    assert source.name == "Qwen3MoeForCausalLM (qwen3-30b-a3b)"
    assert source.experts_per_token == 8
    assert source.params == load_source(str(DATA / "zoo" / "qwen3-30b-a3b.json.gz")).params


def config_source(tmp_path: Path, changes: Mapping[str, object]) -> ModelSource:
    record = json.loads(QWEN.read_text()) | {"num_hidden_layers": 1} | changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in record.items() if value != "absent"}))
    return load_source(str(tmp_path))


def test_a_config_without_architectures_gets_the_language_model(tmp_path: Path) -> None:
    source = config_source(tmp_path, {"architectures": "absent"})
    assert source.params[-1].name == "lm_head.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nosuch"}, "unknown architecture 'nosuch'"),
        ({"model_type": "nosuch", "auto_map": {}}, "its own code \\(auto_map\\) is never run"),
        ({"model_type": "absent"}, "no model_type"),
        ({"architectures": ["NoSuchModel"]}, "unknown architecture 'NoSuchModel'"),
        ({"hidden_size": "wide"}, "transformers cannot build this model"),
        ({"hidden_act": "nosuch"}, "transformers cannot build this model: KeyError"),
        ({"moe_intermediate_size": 0}, "every size of its shape must be at least 1"),
        ({"dtype": "int3"}, "dtype must be bfloat16"),
    ],
)
def test_a_config_that_cannot_be_built(tmp_path: Path, changes: Mapping[str, object], message: str) -> None:
    with pytest.raises(FreeholdError, match=message) as caught:
        config_source(tmp_path, changes)
    assert "\n" not in str(caught.value)


SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
FAMILIES: dict[str, Mapping[str, object]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"]},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "bert": {"architectures": ["BertForMaskedLM"]},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128, "num_layers": 2, "d_kv": 16},
    "mamba": {"architectures": ["MambaForCausalLM"]},
    "vit": {"architectures": ["ViTForImageClassification"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_alone_are_routed_as_the_modules_are(tmp_path: Path, family: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **SMALL, **FAMILIES[family]}))
    modules = [spec for spec in load_source(str(path)).params if spec.tied_to is None]
    listed, _ = route_listed(ListedParam(name=spec.name, shape=spec.shape) for spec in modules)
    assert [(spec.name, spec.rule) for spec in listed] == [(spec.name, spec.rule) for spec in modules]


def test_a_source_says_which_package_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SourceError, match=r"this source needs transformers: pip install 'freehold\[torch,models\]'"):
        load_source(str(QWEN))


def test_dtype_and_matrices_alone() -> None:
    params = (ParamSpec(name="w", shape=(8, 8)), ParamSpec(name="b", shape=(8,), rule="elementwise"))
    source = ModelSource(name="toy", params=params)
    assert {spec.dtype for spec in source.with_dtype("fp32").params} == {"float32"}
    assert [spec.name for spec in source.matrices().params] == ["w"]
    with pytest.raises(SourceError, match=r"dtype must be bfloat16, .* got 'int8'"):
        source.with_dtype("int8")
    with pytest.raises(SourceError, match="none of its 1 params is a matrix"):
        ModelSource(name="toy", params=params[1:]).matrices()
