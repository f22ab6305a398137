"""Whatever happens to one rank, the others end soon, with an error that names it. Never a hang."""

from __future__ import annotations

import pytest
from fault_world import GRACE_S, POINTS, TIMEOUT_S, Fault, draw, run_fault

_FAST = {"kill": (1, 4), "stop": (0, 3), "pause": (5,), "raise": (1, 2)}


def _check(fault: Fault) -> None:
    for outcome in run_fault(fault):
        about = f"{fault}\n{outcome}"
        assert outcome.error == "PeerError", about
        assert outcome.again == "LifecycleError", about
        assert outcome.after_s <= TIMEOUT_S + GRACE_S, about
        assert outcome.ended_s is not None, f"still running\n{about}"
        assert outcome.ended_s <= TIMEOUT_S + GRACE_S, about
        assert "rank" in outcome.text, about
        if fault.kind in ("kill", "stop", "leave", "zero_grad"):
            assert str(fault.victim) in outcome.text, about
        if fault.kind in ("kill", "raise"):  # known at once: far below the limit
            assert outcome.after_s <= TIMEOUT_S, about
        if fault.kind == "raise":
            assert f"rank {fault.victim} stopped: HitError: bad luck in {fault.point}" in outcome.text, about


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seeds in _FAST.items() for seed in seeds])
def test_a_rank_that_is_lost_ends_the_others(kind: str, seed: int) -> None:
    _check(draw(seed, kind))


@pytest.mark.parametrize("kind", ["leave", "collective", "zero_grad"])
def test_a_rank_that_goes_its_own_way_ends_in_errors(kind: str) -> None:
    _check(draw(0, kind))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_twenty_of_twenty(kind: str) -> None:
    faults = [draw(seed, kind) for seed in range(100, 120)]
    assert {fault.point for fault in faults} == set(POINTS)
    for fault in faults:
        _check(fault)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["pause", "leave", "collective", "zero_grad"])
def test_every_own_way_often(kind: str) -> None:
    for seed in range(1, 6):
        _check(draw(seed, kind))
