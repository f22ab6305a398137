"""Headers of safetensors files: written by hand, and by the format's own library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freehold.errors import SourceError
from freehold.sources import load_source

Tensors = dict[str, tuple[str, list[int]]]


def write(path: Path, tensors: Tensors) -> Path:
    """A file with a header and no data: data must not be needed."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()
    }
    data = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    return path


MODEL: Tensors = {
    "lm_head.weight": ("BF16", [1000, 64]),
    "model.embed_tokens.weight": ("BF16", [1000, 64]),
    "model.layers.0.mlp.up_proj.weight": ("BF16", [128, 64]),
    "model.layers.10.mlp.up_proj.weight": ("F32", [128, 64]),
    "model.layers.2.input_layernorm.weight": ("BF16", [64]),
    "model.norm.weight": ("BF16", [64]),
}
MODEL_ORDER = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.2.input_layernorm.weight",
    "model.layers.10.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def test_a_file_gives_its_params_in_model_order(tmp_path: Path) -> None:
    source = load_source(str(write(tmp_path / "model.safetensors", MODEL)))
    assert [spec.name for spec in source.params] == MODEL_ORDER
    assert [spec.rule for spec in source.params] == ["elementwise", "matrix", "elementwise"] + ["matrix"] + [
        "elementwise"
    ] * 2
    assert {spec.dtype for spec in source.params} == {"bfloat16", "float32"}


def test_shards_beside_an_index_give_the_same(tmp_path: Path) -> None:
    names = list(MODEL)
    parts = {"a-1.safetensors": names[:3], "a-2.safetensors": names[3:]}
    for file, members in parts.items():
        write(tmp_path / file, {name: MODEL[name] for name in members})
    index = {"metadata": {}, "weight_map": {name: file for file, members in parts.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = load_source(str(write(tmp_path / "whole.safetensors", MODEL)))
    assert load_source(str(tmp_path / "model.safetensors.index.json")).params == whole.params
    assert load_source(str(tmp_path)).params == whole.params, "the folder is enough"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(SourceError, match=r"1 shards are not beside it, gone.safetensors among them"):
        load_source(str(path))


def test_a_tensor_that_the_index_promises_and_no_shard_has(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": ("F32", [8, 8])})
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}))
    with pytest.raises(SourceError, match="1 tensors are not in its shards, 'v' among them"):
        load_source(str(path))


@pytest.mark.parametrize("record", [{"weight_map": []}, {"weight_map": {"w": 3}}])
def test_an_index_of_the_wrong_form(tmp_path: Path, record: object) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(record))
    with pytest.raises(SourceError, match="expected an object with a weight_map"):
        load_source(str(path))


def test_what_is_not_trained_is_left_out_with_a_note(tmp_path: Path) -> None:
    tensors: Tensors = {
        "layers.0.weight": ("F8_E4M3", [128, 128]),
        "layers.0.weight_scale_inv": ("F32", [1, 1]),
        "position_ids": ("I64", [1, 512]),
    }
    source = load_source(str(write(tmp_path / "model.safetensors", tensors)))
    assert [(spec.name, spec.dtype) for spec in source.params] == [("layers.0.weight", "float8_e4m3fn")]
    assert source.notes == (
        "1 tensors of type I64 are left out.",
        "1 tensors that scale quantised weights are left out.",
    )


def test_a_file_with_nothing_to_train(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"ids": ("I64", [4])})
    with pytest.raises(SourceError, match=r"nothing that can be trained\. 1 tensors of type I64 are left out"):
        load_source(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a header of 0 bytes cannot be"),
        (b"\x05\0\0\0\0\0\0\0{}", "a header of 5 bytes cannot be"),
        (b"\xff" * 16, "cannot be"),
        (b"\x02\0\0\0\0\0\0\0{]", "its header is not JSON"),
        (b"\x02\0\0\0\0\0\0\0[]", "its header is no object"),
        (b'\x0b\0\0\0\0\0\0\0{"w": [8, 8]}'[:19], "its header is not JSON"),
        (b'\x0c\0\0\0\0\0\0\0{"w":[8, 8]}', "tensor 'w' has no dtype and shape"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message) as caught:
        load_source(str(path))
    assert str(path) in str(caught.value)


def test_a_file_of_the_formats_own_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "model.safetensors"
    library.save_file({"b.weight": numpy.zeros((4, 6), "float32"), "a.bias": numpy.zeros(3, "float16")}, path)
    shapes = {spec.name: (spec.shape, spec.dtype, spec.rule) for spec in load_source(str(path)).params}
    assert shapes == {
        "a.bias": ((3,), "float16", "elementwise"),
        "b.weight": ((4, 6), "float32", "matrix"),
    }
