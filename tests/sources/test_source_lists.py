"""Lists of names and shapes, inline shapes, and how both are told apart."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from freehold.errors import SourceError
from freehold.sources import ListedParam, from_inline, from_list, load_source
from freehold.sources.routing import route_listed

ZOO = Path(__file__).parents[1] / "data" / "zoo"


def rules(listed: list[tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    params, _ = route_listed(ListedParam(name=name, shape=shape) for name, shape in listed)
    return {spec.name: spec.rule for spec in params}


def test_inline_shapes_are_matrices_of_their_own() -> None:
    source = load_source("128x2688x1856,4x1024x1024")
    assert [spec.shape for spec in source.params] == [(2688, 1856)] * 128 + [(1024, 1024)] * 4
    assert {spec.rule for spec in source.params} == {"matrix"}
    assert len({spec.name for spec in source.params}) == 132


def test_an_inline_stack_is_one_param_of_many_matrices() -> None:
    (stack,) = from_inline("stack:128x1536x2048").params
    assert (stack.shape, stack.num_granules, stack.granule) == ((128, 1536, 2048), 128, 1536 * 2048)


def test_the_same_shape_twice_gives_distinct_names() -> None:
    names = [spec.name for spec in from_inline("2x8x8, 8x8, stack:2x8x8, stack:2x8x8").params]
    assert names == ["8x8.0", "8x8.1", "8x8.2", "stack:2x8x8.0", "stack:2x8x8.1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x8x8", "every number must be at least 1, got 0"),
        ("8x-8", "every number must be at least 1, got -8"),
        ("4x8xa", "cannot read '4x8xa' as shapes"),
        ("4x8x8,", "cannot read '' as shapes"),
        ("2x3x4x5", "cannot read '2x3x4x5' as shapes"),
        ("stack:8x8", "a stack has three sizes"),
        ("stack:", "cannot read 'stack:' as shapes"),
        ("1000000000x8x8", "more than 1000000 matrices"),
    ],
)
def test_inline_shapes_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        load_source(text)


@pytest.mark.parametrize("path", sorted(ZOO.glob("*.json.gz")), ids=lambda path: path.name.partition(".")[0])
def test_public_models_are_routed_as_people_train_them(path: Path) -> None:
    """Spelled out without the code under test: what is an embedding, a head, a vector or a bias is no matrix."""
    source = load_source(str(path))
    assert [[spec.name, list(spec.shape)] for spec in source.params] == json.loads(gzip.decompress(path.read_bytes()))
    assert source.notes == ()
    for spec in source.params:
        by_hand = (
            any(word in spec.name for word in ("embed_tokens", "lm_head", ".wte.", ".wpe."))
            or len(spec.shape) == 1
            or spec.name.endswith("bias")
        )
        assert (spec.rule == "elementwise") == by_hand, spec.name


def test_a_plain_json_list_reads_like_a_gzipped_one(tmp_path: Path) -> None:
    entries = [["embed.weight", [100, 8]], ["up.weight", [32, 8]]]
    plain, packed = tmp_path / "shapes.json", tmp_path / "shapes"
    plain.write_text(json.dumps(entries))
    packed.write_bytes(gzip.compress(json.dumps(entries).encode()))
    assert load_source(str(plain)).params == load_source(str(packed)).params


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([["w", [8, 0]]], "param 'w': every size of its shape must be at least 1"),
        ([["w", ["8", "8"]]], "param 'w': shape must be a tuple of ints"),
        ([["w", [8, True]]], "param 'w': shape must be a tuple of ints"),
        ([["w", [8, 1.5]]], "param 'w': shape must be a tuple of ints"),
        ([["w", "8x8"]], r"entry 0 must be \[name, \[size, ...\]\]"),
        ([["w", [8]], [8, 8]], "entry 1 must be"),
        ([["w", [8]], ["w", [8]]], "param 'w' is listed twice"),
        ([], "the list of params is empty"),
        ("text", r"expected a config.json, an index.json or a list \[\[name, shape\], ...\]"),
        (3, "expected a config.json"),
    ],
)
def test_lists_that_make_no_sense(tmp_path: Path, entries: object, message: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(SourceError, match=message):
        load_source(str(path))


def test_all_faults_of_a_list_are_told_at_once_up_to_a_limit() -> None:
    with pytest.raises(SourceError, match=r"'a'.*'b'.*listed twice") as caught:
        from_list([["a", [0]], ["b", ["x"]], ["b", [1]]], name="toy")
    assert str(caught.value).startswith("toy: ")
    with pytest.raises(SourceError, match=r"'p4'.*; and 95 more$"):
        from_list([[f"p{index}", [0]] for index in range(100)], name="toy")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "is no JSON file"),
        (b"", "is no JSON file"),
        (b"\xff\xfe\x00", "is no JSON file"),
        (b"\x1f\x8b not really gzip", "cannot read"),
        (gzip.compress(b"[]")[:-4], "cannot read"),
        (b"[" * 100_000, "is no JSON file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message) as caught:
        load_source(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["nosuch.json", "", "a" * 5000, "bad\0name"])
def test_a_path_that_does_not_exist(text: str) -> None:
    with pytest.raises(SourceError, match=r"no such file|cannot read"):
        load_source(text)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a folder without config.json, model.safetensors.index.json or"):
        load_source(str(tmp_path))


def test_a_param_with_as_many_rows_as_an_embedding_is_a_head_whatever_its_name() -> None:
    assert rules([("wte.weight", (1000, 64)), ("mlp.weight", (64, 64)), ("decode.weight", (1000, 64))]) == {
        "wte.weight": "elementwise",
        "mlp.weight": "matrix",
        "decode.weight": "elementwise",
    }


def test_where_the_vocabulary_is_a_width_too_only_a_param_that_stands_alone_is_a_head() -> None:
    layers = [(f"layers.{index}.up.weight", (64, 64)) for index in range(3)]
    found = rules([("embed.weight", (64, 64)), *layers, ("out.weight", (64, 64))])
    assert [name for name, rule in found.items() if rule == "elementwise"] == ["embed.weight", "out.weight"]


def test_a_head_that_cannot_be_told_is_guessed_with_a_note() -> None:
    listed = [("embed.weight", (64, 64)), ("first.weight", (64, 64)), ("last.weight", (64, 64))]
    params, notes = route_listed(ListedParam(name=name, shape=shape) for name, shape in listed)
    assert [spec.rule for spec in params] == ["elementwise", "matrix", "elementwise"]
    assert notes == (
        "64 is both the row count of an embedding and a width of the model; of first.weight, last.weight the last is "
        "taken for the output head.",
    )


def test_words_inside_other_words_are_no_embeddings() -> None:
    found = rules([("member.weight", (8, 9)), ("x_embedder.weight", (8, 9)), ("embed_proj.linear.weight", (8, 9))])
    assert set(found.values()) == {"matrix"}


def test_convolutions_are_one_matrix_and_stacks_are_many() -> None:
    params, _ = route_listed(
        [
            ListedParam(name="patch_embed.proj.weight", shape=(16, 3, 5, 7)),
            ListedParam(name="depthwise.weight", shape=(64, 1, 3, 3)),
            ListedParam(name="conv1d.weight", shape=(128, 1, 4)),
            ListedParam(name="feature.conv.weight", shape=(512, 1, 10)),
            ListedParam(name="experts.up", shape=(4, 8, 16)),
            ListedParam(name="scale", shape=(1, 1, 64)),
        ]
    )
    assert [spec.matrix_shape for spec in params] == [(16, 105), (64, 9), (128, 4), (512, 10), (8, 16), None]
    assert [spec.num_granules for spec in params] == [1, 1, 1, 1, 4, 64]
