"""The model and the text of the training example."""

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.mark.parametrize("name", ["corpus", "gpt", "stopwatch"])
def test_docstring_examples_run(load: Any, name: str) -> None:
    result = doctest.testmod(load(name))
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("fused_qkv", [False, True])
def test_model_sees_the_past_only(load: Any, fused_qkv: bool) -> None:
    gpt = load("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(vocab_size=17, width=32, num_layers=2, num_heads=2, fused_qkv=fused_qkv))
    tokens = torch.randint(17, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert (after[:, 7:] - before[:, 7:]).abs().amax(dim=-1).min() > 1e-6  # and all of it: every later place notices


def test_attention_knows_the_order_of_tokens(load: Any) -> None:
    gpt = load("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(vocab_size=17, width=32, num_layers=1, num_heads=2))
    one = model(torch.tensor([[1, 2, 3]]))[0, -1]
    other = model(torch.tensor([[2, 1, 3]]))[0, -1]  # without positions the last token would see the same set
    assert (one - other).abs().max() > 1e-6


def test_fused_projection_computes_what_three_do(load: Any) -> None:
    gpt = load("gpt")
    sizes = {"vocab_size": 17, "width": 32, "num_layers": 1, "num_heads": 2}
    three, fused = gpt.GPT(gpt.GPTConfig(**sizes)), gpt.GPT(gpt.GPTConfig(**sizes, fused_qkv=True))
    weights = three.state_dict()
    parts = [weights.pop(f"blocks.0.attention.{name}.weight") for name in ("query", "key", "value")]
    fused.load_state_dict(weights | {"blocks.0.attention.qkv.weight": torch.cat(parts)})
    tokens = torch.randint(17, (2, 5))
    torch.testing.assert_close(fused(tokens), three(tokens))


def test_tied_head_is_the_embedding(load: Any) -> None:
    gpt = load("gpt")
    model = gpt.GPT(gpt.GPTConfig(vocab_size=17, width=32, num_layers=1, num_heads=2, tied_head=True))
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_corpus_holds_out_every_sixteenth_file(load: Any, tmp_path: Path) -> None:
    corpus = load("corpus")
    for index in range(32):
        (tmp_path / f"{index:02}.txt").write_bytes(bytes([index]) * 1000)
    read = corpus.load_corpus(tmp_path, max_bytes=10**6)
    assert set(read.valid.tolist()) == {15, 31}
    assert set(read.train.tolist()) == set(range(32)) - {15, 31}
    assert read.train.numel() == 30_000


def test_corpus_of_one_file_holds_out_its_end_and_stops_at_the_cap(load: Any, tmp_path: Path) -> None:
    corpus = load("corpus")
    text = bytes(range(256)) * 128
    (tmp_path / "text").write_bytes(text)
    read = corpus.load_corpus(tmp_path / "text", max_bytes=16 * 1024)
    assert bytes(read.train.tolist()) + bytes(read.valid.tolist()) == text[: 16 * 1024]
    assert read.valid.numel() == 1024


def test_too_little_text_is_refused(load: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="5 bytes in 1 files leave too little"):
        load("corpus").load_corpus(tmp_path, max_bytes=10**6)


def test_batches_depend_on_the_seed_alone(load: Any) -> None:
    corpus = load("corpus")
    text = torch.randint(256, (4096,), dtype=torch.uint8)
    first = corpus.sample_batch(text, batch_size=4, seq_len=32, seed=5)
    torch.manual_seed(9)
    again = corpus.sample_batch(text, batch_size=4, seq_len=32, seed=5)
    other = corpus.sample_batch(text, batch_size=4, seq_len=32, seed=6)
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(first.tokens[:, 1:], first.targets[:, :-1])


def test_validation_covers_both_ends_of_the_text(load: Any) -> None:
    corpus = load("corpus")
    text = torch.arange(200, dtype=torch.uint8)
    batches = corpus.validation_batches(text, num_batches=3, batch_size=2, seq_len=10)
    assert len(batches) == 3
    assert batches[0].tokens[0, 0] == 0
    assert batches[-1].targets[-1, -1] == 199
