"""Ranks that have parted in silence are found, and told which param and which ranks."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
import worlds
from ranks import run_ranks
from torch import nn

from freehold.errors import FreeholdError
from freehold.runtime.verify import hash_tensor


def _behind_the_back(tensor: torch.Tensor) -> None:
    """Flip one bit of one element without PyTorch's knowledge: a faulty memory, or a stray kernel."""
    tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16).numpy().reshape(-1)[-1] ^= 1


def _break(what: str, net: worlds.Net, opt: Any) -> None:
    if what == "weight":
        _behind_the_back(net.out.weight)
    elif what == "frozen":
        _behind_the_back(net.frozen.bias)
    elif what == "step counter":
        opt._by_name["up"].num_steps += 1
    elif what == "options":
        opt.param_groups[1]["lr"] = 0.03


def _verify(what: str) -> tuple[str, str] | None:
    net = worlds.make()
    opt = worlds.wrap(net)
    worlds.train(net, opt, 0, 2)
    opt.verify()
    if dist.get_rank() == 1:
        _break(what, net, opt)
    error = cases.error_of(opt.verify)
    opt.close()
    return error


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weight", "weight 'out.weight' of ranks [1] from that of ranks [0, 2] differs"),
        ("frozen", "frozen weight 'frozen.bias' of ranks [1] from that of ranks [0, 2] differs"),
        ("step counter", "step counter of 'up' of ranks [1] from that of ranks [0, 2] differs"),
        ("options", "param_groups of ranks [1] from that of ranks [0, 2] differs"),
    ],
)
def test_verify_names_the_first_param_and_the_ranks(what: str, message: str) -> None:
    errors = run_ranks(3, _verify, what)
    assert errors[0] == errors[1] == errors[2]
    assert errors[0][0] == "ConsistencyError"
    assert message in errors[0][1]


def _verify_masters() -> tuple[str, str] | None:
    net = worlds.make(torch.bfloat16)
    opt = worlds.wrap(net)
    worlds.train(net, opt, 0, 2)
    with torch.no_grad():
        net.out.weight.mul_(2)  # the user may write; masters follow
    opt.verify()
    worlds.train(net, opt, 2, 3)
    for bucket in opt._buckets:
        for slot in bucket.owned:
            if slot.name == "out.weight":
                bucket.memory.master[slot.offset] += 1.0
    error = cases.error_of(opt.verify)
    opt.close()
    return error


def test_a_master_that_left_its_weight_is_found() -> None:
    first, second = run_ranks(2, _verify_masters)
    assert first == second
    assert "the weight of 'out.weight' is not its fp32 master, rounded" in first[1]


def _verify_every() -> list[tuple[str, str] | None]:
    net = worlds.make()
    opt = worlds.wrap(net, verify_every=2)
    worlds.train(net, opt, 0, 4)
    if dist.get_rank() == 1:
        _behind_the_back(net.frozen.weight)
    errors = [cases.error_of(lambda step=step: worlds.train(net, opt, step, step + 1)) for step in (4, 5)]
    opt.close()
    return errors


def test_verify_every_finds_it_in_time() -> None:
    for errors in run_ranks(2, _verify_every):
        assert errors[0] is None
        assert errors[1] is not None
        assert "frozen weight 'frozen.weight'" in errors[1][1]


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_verify_every_must_be_a_count(value: Any) -> None:
    with pytest.raises(FreeholdError, match="verify_every must be an int of at least 1"):
        cases.wrap(nn.Linear(8, 8), verify_every=value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    for numel in (1, 2, 3, 5, 8, 131):
        tensor = (cases.data(0, numel) > 0).to(dtype)
        hashes = {hash_tensor(tensor)}
        raw = tensor.view(torch.uint8)
        for byte in range(raw.numel()):
            for bit in range(1 if dtype == torch.bool else 8):
                changed = raw.clone()
                changed[byte] ^= 1 << bit
                hashes.add(hash_tensor(changed.view(dtype)))
        assert len(hashes) == 1 + raw.numel() * (1 if dtype == torch.bool else 8)


def test_order_and_chunks_count() -> None:
    big = cases.data(0, 2**19 + 7)
    swapped = big.clone()
    swapped[[0, 2**18]] = big[[2**18, 0]]
    assert hash_tensor(swapped) != hash_tensor(big)
    assert hash_tensor(big[1:]) != hash_tensor(big[:-1])
    assert hash_tensor(torch.empty(0)) == 0
