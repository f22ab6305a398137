"""Text to train on, as bytes: Python's own standard library by default, so that nothing need be downloaded."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Batch", "Corpus", "load_corpus", "sample_batch", "validation_batches"]

_HOLD_OUT_EVERY = 16  # one file in 16 is never trained on; of a single file, its last sixteenth


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two byte strings that share no file.

    Attributes:
        source: Where the text comes from, for people.
        train: 1-D uint8.
        valid: 1-D uint8, held out.
    """

    source: str
    train: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Bytes and the bytes that follow them, each ``(batch, seq)`` int64."""

    tokens: Tensor
    targets: Tensor


def load_corpus(path: Path | None, *, max_bytes: int) -> Corpus:
    """Read a file, every ``*.py`` and ``*.txt`` and ``*.md`` file of a folder, or the standard library's modules.

    The same files in the same order give the same corpus on every rank and in every run.

    Args:
        path: A file or a folder; ``None`` means the source of the running Python's standard library.
        max_bytes: Reading stops here.

    Raises:
        ValueError: There is not enough text.
    """
    source = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = [source] if source.is_file() else _text_files(source, recurse=path is not None)
    train, valid, num_bytes = bytearray(), bytearray(), 0
    for index, file in enumerate(files):
        text = file.read_bytes()[: max_bytes - num_bytes]
        num_bytes += len(text)
        if len(files) == 1:
            cut = len(text) - len(text) // _HOLD_OUT_EVERY
            train, valid = bytearray(text[:cut]), bytearray(text[cut:])
        else:
            (valid if index % _HOLD_OUT_EVERY == _HOLD_OUT_EVERY - 1 else train).extend(text)
    if len(valid) < 1024:
        raise ValueError(f"{source}: {num_bytes} bytes in {len(files)} files leave too little to validate on")
    return Corpus(source=str(source), train=_to_tensor(train), valid=_to_tensor(valid))


def sample_batch(text: Tensor, *, batch_size: int, seq_len: int, seed: int) -> Batch:
    """Cut ``batch_size`` windows out of ``text`` at random; the same seed cuts the same windows.

    Example:
        >>> text = torch.arange(100, dtype=torch.uint8)
        >>> batch = sample_batch(text, batch_size=2, seq_len=4, seed=0)
        >>> batch.tokens.shape, bool((batch.targets == batch.tokens + 1).all())
        (torch.Size([2, 4]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(text.numel() - seq_len, (batch_size,), generator=generator)
    return _windows(text, starts, seq_len)


def validation_batches(text: Tensor, *, num_batches: int, batch_size: int, seq_len: int) -> list[Batch]:
    """Windows at fixed places, spread evenly over ``text``; each byte of a window counts once."""
    starts = torch.linspace(0, text.numel() - seq_len - 1, num_batches * batch_size).long()
    return [_windows(text, part, seq_len) for part in starts.split(batch_size)]


def _windows(text: Tensor, starts: Tensor, seq_len: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    return Batch(tokens=windows[:, :-1], targets=windows[:, 1:])


def _text_files(folder: Path, *, recurse: bool) -> list[Path]:
    found = folder.rglob("*") if recurse else folder.glob("*.py")
    return sorted(file for file in found if file.is_file() and file.suffix in {".py", ".txt", ".md"})


def _to_tensor(text: bytearray) -> Tensor:
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
