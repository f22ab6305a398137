"""Damaged checkpoints and hostile disks: one clear error on every rank, nothing loaded, nothing half-written."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
import worlds
from ranks import run_ranks
from torch import nn

import freehold
from freehold.errors import CheckpointError, FreeholdError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "2"
    run_ranks(2, _save, str(path))
    return path


def _save(path: str) -> None:
    net = worlds.make(torch.bfloat16)
    opt = worlds.wrap(net)
    worlds.train(net, opt, 0, 2)
    freehold.save(path, net, opt, extra={"note": "two", "random": torch.get_rng_state()})
    opt.close()


def _parts(path: Path) -> list[Path]:
    return sorted(path.glob("part-*"))


def _truncate(path: Path) -> None:
    part = _parts(path)[1]
    os.truncate(part, part.stat().st_size - 1)


def _flip(path: Path) -> None:
    part = _parts(path)[0]
    data = bytearray(part.read_bytes())
    data[-5] ^= 4
    part.write_bytes(data)


def _remove_chunk(path: Path) -> None:
    worlds.resign(path, lambda body: body["tensors"]["optim.embedding.weight.exp_avg"]["chunks"].pop())


def _escape(path: Path) -> None:
    shutil.copy(_parts(path)[0], path.parent / "elsewhere.safetensors")

    def change(body: dict[str, Any]) -> None:
        body["files"][0][0] = "../elsewhere.safetensors"
        for record in body["tensors"].values():
            for chunk in record["chunks"]:
                chunk[0] = chunk[0].replace("part-00000", "../elsewhere")

    worlds.resign(path, change)


def _link(path: Path) -> None:
    part = _parts(path)[0]
    part.rename(path.parent / "outside")
    part.symlink_to(path.parent / "outside")


def _flip_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    assert text.count('"steps":2') > 3
    (path / "manifest.json").write_text(text.replace('"steps":2', '"steps":3', 1))


def _beyond(path: Path) -> None:
    worlds.resign(path, lambda body: body["tensors"]["model.out.weight"]["chunks"][0].__setitem__(1, 10**9))


def _many_times(path: Path) -> None:
    """A thousand tensors in the bytes of one: loading them would take a thousand times its memory."""

    def change(body: dict[str, Any]) -> None:
        one = body["tensors"]["model.embedding.weight"]
        body["tensors"] |= {f"extra.{i}": one for i in range(1, 1001)}
        body["extra"] = [{"$tensor": f"extra.{i}"} for i in range(1, 1001)]

    worlds.resign(path, change)


def _other_version(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"version":1', '"version":2'))


def _deep(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


DAMAGE = {
    "truncated": (_truncate, "has .* bytes where .* were written"),
    "flipped": (_flip, "was changed or damaged"),
    "missing part": (lambda path: _parts(path)[1].unlink(), "part-00001.safetensors is missing"),
    "missing chunk": (_remove_chunk, "chunks of 'optim.embedding.weight.exp_avg' are missing"),
    "missing manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "flipped manifest": (_flip_manifest, "manifest.json was changed or damaged"),
    "path that leaves": (_escape, "file name '../elsewhere.safetensors'"),
    "link": (_link, "part-00000.safetensors cannot be read"),
    "offset past the end": (_beyond, "past its end"),
    "bytes listed twice": (_many_times, "chunks of 'extra.[0-9]*' and '.*' overlap in 'part-0000.*'"),
    "another version": (_other_version, "of version 1, got 'freehold.checkpoint' of 2"),
    "nested without end": (_deep, "no manifest, or a damaged one"),
    "no directory": (shutil.rmtree, "is not a directory"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text(""), "no manifest, or a damaged one"),
}


def _load_all(paths: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Load each; nothing may change, and the optimizer must still work."""
    net = worlds.make(torch.bfloat16, seed=100)
    opt = worlds.wrap(net, bucket_numel=None)
    worlds.train(net, opt, 0, 1)
    before = cases.snapshot(opt)
    found: dict[str, tuple[str, str]] = {}
    for what, path in paths.items():
        error = cases.error_of(lambda path=path: freehold.load(path, net, opt))
        assert error is not None, f"{what} was loaded"
        cases.assert_same(cases.snapshot(opt), before, what)
        found[what] = error
    worlds.train(net, opt, 1, 2)
    opt.close()
    return found


def test_damage_of_every_kind_is_found_before_anything_is_loaded(good: Path, tmp_path: Path) -> None:
    paths: dict[str, str] = {}
    for what, (damage, _) in DAMAGE.items():
        paths[what] = str(tmp_path / what / "2")
        shutil.copytree(good, paths[what])
        damage(Path(paths[what]))
    first, second = run_ranks(2, _load_all, paths)
    assert first == second  # the same error on every rank
    for what, (_, message) in DAMAGE.items():
        assert first[what][0] == "CheckpointError", first[what]
        assert re.search(message, first[what][1]), (what, first[what])


def _corrupt(path: Path, random_: random.Random) -> str:
    file = random_.choice(sorted(path.iterdir()))
    size = file.stat().st_size
    how = random_.choice(["flip", "truncate", "delete", "zero", "append", "garbage", "cut out"])
    data = bytearray(file.read_bytes())
    at = random_.randrange(size)
    if how == "delete":
        file.unlink()
        return f"{how} {file.name}"
    if how == "flip":
        data[at] ^= 1 << random_.randrange(8)
    elif how == "truncate":
        del data[at:]
    elif how == "zero":
        stop = min(size, at + random_.randrange(1, 4096))
        data[at:stop] = bytes(b ^ 0xFF if b == 0 else 0 for b in data[at:stop])
    elif how == "append":
        data += random_.randbytes(random_.randrange(1, 100))
    elif how == "cut out":
        del data[at : at + random_.randrange(1, 64)]
    else:
        data = bytearray(random_.randbytes(random_.randrange(0, 2000)))
    file.write_bytes(data)
    return f"{how} {file.name} at {at}"


def _corrupt_many(good: Path, seeds: range, folder: Path) -> None:
    net = worlds.make(torch.bfloat16, seed=100)
    opt = worlds.wrap(net)
    before = cases.snapshot(opt)
    for seed in seeds:
        path = folder / str(seed)
        shutil.copytree(good, path)
        what = _corrupt(path, random.Random(seed))
        found = cases.error_of(lambda path=path: freehold.load(path, net, opt))
        assert found is not None, f"{seed}: {what} was loaded"
        assert found[0] == "CheckpointError", f"{seed}: {what}: {found}"
        assert str(path) in found[1], f"{seed}: {what}: {found}"
        shutil.rmtree(path)
    cases.assert_same(cases.snapshot(opt), before)
    freehold.load(good, net, opt)
    opt.close()


def test_25_random_corruptions_are_refused(good: Path, tmp_path: Path) -> None:
    _corrupt_many(good, range(25), tmp_path)


@pytest.mark.slow
def test_500_random_corruptions_are_refused(good: Path, tmp_path: Path) -> None:
    _corrupt_many(good, range(1000, 1500), tmp_path)


def _differing(path: str) -> tuple[str, str] | None:
    """Rank 1 sees another file: a disk that is not shared."""
    net = worlds.make(torch.bfloat16)
    opt = worlds.wrap(net)
    mine = path if dist.get_rank() == 0 else str(Path(path).parent / "not there" / "2")
    error = cases.error_of(lambda: freehold.load(mine, net, opt))
    opt.close()
    return error


def test_one_rank_that_cannot_read_stops_all(good: Path) -> None:
    first, second = run_ranks(2, _differing, str(good))
    assert first == second
    assert first[0] == "CheckpointError"
    assert "rank 1:" in first[1]
    assert "is not a directory" in first[1]


def test_every_mismatch_is_reported_at_once(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    opt = cases.wrap(net)
    freehold.save(tmp_path / "0", net, opt)
    opt.close()
    other = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8).bfloat16(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    opt = cases.wrap(other)
    before = cases.weights(other)
    with pytest.raises(CheckpointError) as caught:
        freehold.load(tmp_path / "0", other, opt)
    for expected in (
        "'0.weight': expected shape (9, 8), the checkpoint has (8, 8)",
        "'momentum_buffer' of param '0.weight': expected shape (9, 8)",
        "'1.bias': expected torch.bfloat16, the checkpoint has torch.float32",
        "'master' of param '1.weight' is missing from the checkpoint",
        "'2.running_mean' is missing from the checkpoint",
        "'3.weight' is missing from the checkpoint",
    ):
        assert expected in str(caught.value), expected
    cases.assert_same(cases.weights(other), before)
    opt.close()


def test_another_rule_is_a_mismatch(tmp_path: Path) -> None:
    net = nn.Linear(8, 8)
    opt = cases.wrap(net)
    freehold.save(tmp_path / "0", net, opt)
    opt.close()
    opt = cases.wrap(net, elementwise=cases.PlainSGD())
    with pytest.raises(CheckpointError, match="param 'bias' was updated by AdamW, and now is by PlainSGD"):
        freehold.load(tmp_path / "0", net, opt)
    opt.close()


# ---- disks that refuse -------------------------------------------------------------------------------------------


def _full_disk(path: str, how: str) -> tuple[str, str] | None:
    """Rank 1 may write no more than a few bytes to any file; the limit is the kernel's own."""
    net = worlds.make()
    opt = worlds.wrap(net)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        if how == "save":
            error = cases.error_of(lambda: freehold.save(path, net, opt))
        else:
            freehold.async_save(path, net, opt)  # the failure is in the thread
            worlds.train(net, opt, 0, 1)
            error = cases.error_of(lambda: freehold.async_save(path + "-next", net, opt))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    freehold.save(path, net, opt)  # there is room again
    freehold.load(path, net, opt)
    opt.close()
    return error


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(how: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _full_disk, str(tmp_path / "0"), how)
    assert first == second
    assert first[0] == "CheckpointError"
    assert "rank 1: writing a part of" in first[1]
    assert "File too large" in first[1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["0"]


def _read_only(path: str) -> tuple[str, str] | None:
    net = worlds.make()
    opt = worlds.wrap(net)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # permissions mean nothing to root
    try:
        error = cases.error_of(lambda: freehold.save(path, net, opt))
    finally:
        os.seteuid(user)
    opt.close()
    return error


def test_a_read_only_directory_is_an_error_on_every_rank() -> None:
    folder = tempfile.mkdtemp()
    try:
        os.chmod(folder, 0o555)
        first, second = run_ranks(2, _read_only, f"{folder}/0")
        assert first == second
        assert first[0] == "CheckpointError"
        assert "Permission denied" in first[1]
        assert f"{folder}/0" in first[1]
        assert not os.listdir(folder)
    finally:
        os.chmod(folder, 0o755)
        shutil.rmtree(folder)


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    net, opt = worlds.saved(tmp_path / "2")
    with pytest.raises(CheckpointError, match="exists already; a checkpoint is never overwritten"):
        freehold.save(tmp_path / "2", net, opt)
    freehold.load(tmp_path / "2", net, opt)
    opt.close()


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({"a": [1, object()]}, r"extra\['a'\]\[1\] is a builtins.object"),
        ({"model": nn.Linear(1, 1)}, r"extra\['model'\] is a torch.nn"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
)
def test_extra_holds_plain_values_only(extra: Any, where: str, tmp_path: Path) -> None:
    net = nn.Linear(8, 8)
    opt = cases.wrap(net)
    with pytest.raises(CheckpointError, match=where):
        freehold.save(tmp_path / "0", net, opt, extra=extra)
    assert not list(tmp_path.iterdir())
    opt.close()


def test_wrong_arguments_are_clear_errors(tmp_path: Path) -> None:
    net = nn.Linear(8, 8)
    opt = cases.wrap(net)
    adam = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    for call, message in (
        (lambda: freehold.save(tmp_path / "0", net, adam), "expected a freehold.LayerwiseOptimizer, got AdamW"),
        (lambda: freehold.save(tmp_path / "0", nn.Linear(8, 8), opt), "pass the model that the optimizer was made"),
        (lambda: freehold.save(tmp_path / "0", None, opt), "expected the model as an nn.Module"),
        (lambda: freehold.load(tmp_path / "0", None, opt), "is not a directory"),
        (lambda: freehold.load(None, net, opt), "there is no checkpoint: path is None"),
        (lambda: freehold.save(tmp_path / "0", net, opt, keep=0), "keep must be an int of at least 1"),
        (lambda: opt.load_state_dict(adam.state_dict()), "matched by position, not by name"),
        (lambda: opt.load_state_dict([]), "got no dict"),
    ):
        with pytest.raises(FreeholdError, match=message):
            call()
    opt.close()
    with pytest.raises(FreeholdError, match="closed"):
        freehold.save(tmp_path / "0", net, opt)
