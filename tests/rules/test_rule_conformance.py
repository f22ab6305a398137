"""What every rule and variant must do. A new one is one row in ``CASES`` of ``rule_cases.py``."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from rule_cases import CASES, Case
from torch import Tensor

from freehold.errors import FreeholdError, RuleError
from freehold.rules import Span

NUM_UPDATES = 4


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def with_options() -> pytest.MarkDecorator:
    pairs = [(name, options) for name, case in CASES.items() for options in case.options]
    ids = [f"{name}-{'-'.join(options) or 'defaults'}" for name, options in pairs]
    return pytest.mark.parametrize(("name", "options"), pairs, ids=ids)


def random_like(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    num_differing = int((actual != expected).sum())
    assert num_differing == 0, f"{what}: {num_differing} of {expected.numel()} elements differ"


def assert_same(case: Case, actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bits where the case is exact, else within its tolerance, relative to the norm."""
    if case.tolerance == 0.0:
        assert_same_bits(actual, expected, what)
        return
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= case.tolerance, f"{what}: relative error {error:.2e}"


def assert_same_update(case: Case, flats: tuple[Any, Any], what: str) -> None:
    """Params and state of two runs of the same rule agree: to the bit, unless batching may change it."""
    for name in ("param", *flats[0].kept()):
        first, second = (flat.param if name == "param" else flat.kept()[name] for flat in flats)
        if case.is_exact_alone:
            assert_same_bits(first, second, f"{what} {name}")
        else:
            assert_same(case, first, second, f"{what} {name}")


def assert_matches_oracle(
    case: Case, flat: Any, params: list[Tensor], optimizer: torch.optim.Optimizer, start: list[Tensor]
) -> None:
    for index, (param, ours) in enumerate(zip(params, flat.split(flat.param), strict=True)):
        what = f"param {index} {tuple(param.shape)}"
        if case.tolerance == 0.0:
            assert_same_bits(ours, param.detach(), what)
        assert_same(case, ours - start[index], param.detach() - start[index], what)
        for name in flat.state.keys() & optimizer.state[param].keys():
            state_case = case if name != "momentum_buffer" else dataclasses.replace(case, tolerance=1e-6)
            assert_same(
                state_case, flat.split(flat.state[name])[index], optimizer.state[param][name], f"{name} {index}"
            )


@with_options()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_updates_are_those_of_the_oracle(
    name: str, options: dict[str, Any], dtype: torch.dtype, flat_params: Any
) -> None:
    case = CASES[name]
    params = [torch.nn.Parameter(p) for p in random_like(case.shapes, dtype)]
    optimizer = case.oracle(params, **options)
    start = [p.detach().clone() for p in params]
    flat = flat_params.of(case.make(**options), start)
    for step in range(1, NUM_UPDATES + 1):
        grads = random_like(case.shapes, dtype)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        flat.update(grads, step)
        assert_matches_oracle(case, flat, params, optimizer, start)


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "1-element"])
def test_tensor_lr_is_used_as_torch_uses_it(
    case: Case, lr_dtype: torch.dtype, shape: tuple[int, ...], flat_params: Any
) -> None:
    lr = torch.full(shape, 0.013, dtype=lr_dtype)
    params = [torch.nn.Parameter(p) for p in random_like(case.shapes)]
    optimizer = case.oracle(params, lr=lr.clone())
    start = [p.detach().clone() for p in params]
    flat = flat_params.of(case.make(lr=lr), start)
    for step in (1, 2):
        grads = random_like(case.shapes)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        flat.update(grads, step)
        lr.mul_(0.5)  # as schedulers do, in place
        optimizer.param_groups[0]["lr"].mul_(0.5)
    assert_matches_oracle(case, flat, params, optimizer, start)


def test_elementwise_work_on_large_spans_and_two_threads_has_the_bits_of_one_param(
    case: Case, flat_params: Any
) -> None:
    # ATen gives each thread 32768 elements or more, and so cuts a span where no param ends
    shapes = ((41, 1001), (7, 13), (65, 513))
    params, grads = random_like(shapes), random_like(shapes)

    def without_blocks(which: slice) -> Any:
        flat = flat_params.of(case.make(), params[which])
        grad = flat.flatten(grads[which])
        span = Span(param=flat.param, grad=grad, state=flat.state | flat.row_state, blocks=(), step=1)
        flat.rule.update(span, flat.options)
        return flat

    torch.set_num_threads(2)
    together = without_blocks(slice(None))
    assert together.param.numel() > 2 * 32768
    torch.set_num_threads(1)
    for index in range(len(shapes)):
        alone = without_blocks(slice(index, index + 1))
        assert_same_bits(together.split(together.param)[index], alone.split(alone.param)[0], "param")
        for name, tensor in together.state.items():
            assert_same_bits(together.split(tensor)[index], alone.split(alone.state[name])[0], name)


def test_spans_may_be_cut_where_the_rule_kind_allows(case: Case, flat_params: Any) -> None:
    params = random_like(case.shapes)
    rule = case.make()
    reference = flat_params.of(rule, params)
    block_starts = [block.offset for block in reference.blocks[1:]]
    anywhere = list(range(64, reference.param.numel(), 64))
    cuts = block_starts if rule.kind == "matrix" else anywhere
    pieces, single_cuts = flat_params.of(rule, params), [flat_params.of(rule, params) for _ in cuts[::5]]
    for step in (1, 2):
        grads = random_like(case.shapes)
        reference.update(grads, step)
        pieces.update(grads, step, cuts=cuts)
        for cut, flat in zip(cuts[::5], single_cuts, strict=True):
            flat.update(grads, step, cuts=[cut])
    for flat in (pieces, *single_cuts):
        assert_same_update(case, (flat, reference), "cut")


def test_padding_stays_zero_and_zeros_stay_zeros(case: Case, flat_params: Any) -> None:
    flat = flat_params.of(case.make(lr=0.5, weight_decay=0.3), random_like(case.shapes))
    zeros = flat_params.of(case.make(lr=0.5, weight_decay=0.3), [torch.zeros(s) for s in case.shapes])
    assert flat.padding(flat.param).numel() > 0
    for step in (1, 2, 3):
        grad = flat.update(random_like(case.shapes), step)
        zeros.update([torch.zeros(shape) for shape in case.shapes], step)
        for tensor in (flat.param, *flat.state.values()):
            assert not flat.padding(tensor).any()
        assert grad.isfinite().all()
        for name, tensor in {"param": zeros.param, **zeros.kept()}.items():
            assert not tensor.any() or "step" in name, name


class RecordingState(Mapping[str, Tensor]):
    def __init__(self, state: dict[str, Tensor]) -> None:
        self._state = state
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a rule names the state that it uses")

    def __len__(self) -> int:
        return len(self._state)


def test_declared_state_is_the_state_used(case: Case, flat_params: Any) -> None:
    flat = flat_params.of(case.make(), random_like(case.shapes))
    assert flat.rule.state_fields() == flat.rule.state_fields(flat.options)
    state = RecordingState(flat.state | flat.row_state)
    span = flat.span(flat.flatten(random_like(case.shapes)), 1, 0, flat.param.numel())
    flat.rule.update(dataclasses.replace(span, state=state), flat.options)
    assert state.read == {field.name for field in flat.rule.state_fields()}
    for name, tensor in flat.state.items():
        assert all(part.any() for part in flat.split(tensor)), f"{name} was never written"


def test_live_options_rule_and_not_those_of_construction(case: Case, flat_params: Any) -> None:
    params, grads = random_like(case.shapes), random_like(case.shapes)
    edited = flat_params.of(case.make(), params, case.make().defaults())
    edited.options.update(lr=0.25, weight_decay=0.125)
    fresh = flat_params.of(case.make(lr=0.25, weight_decay=0.125), params)
    for flat in (edited, fresh):
        flat.update(grads, 1)
    assert_same_update(case, (edited, fresh), "edited")
    assert not torch.equal(edited.param, flat_params.of(case.make(), params).param)


def test_updates_are_deterministic_and_keep_nothing_between_calls(case: Case, flat_params: Any) -> None:
    params, other = random_like(case.shapes), random_like(case.shapes)
    grads = [random_like(case.shapes) for _ in range(2)]
    rule = case.make()
    first, second, stranger = (flat_params.of(rule, p) for p in (params, params, other))
    for step in (1, 2):
        first.update(grads[step - 1], step)
    for step in (1, 2):
        second.update(grads[step - 1], step)
        stranger.update(grads[0], step)
    assert_same_update(case, (first, second), "repeated")


def test_update_works_on_params_that_require_grad(case: Case, flat_params: Any) -> None:
    flat = flat_params.of(case.make(), random_like(case.shapes))
    flat.param.requires_grad_(True)
    before = flat.param.detach().clone()
    flat.update(random_like(case.shapes), 1)
    assert flat.param.grad_fn is None
    assert (flat.param != before).any()


def test_options_bear_the_names_order_and_defaults_of_torch(case: Case) -> None:
    if not case.bears_names_of_torch:
        assert case.make().defaults().keys() >= {"lr", "weight_decay"}
        return
    ours = list(inspect.signature(case.make).parameters.values())
    torchs = inspect.signature(case.oracle).parameters
    shared = [p for p in ours if p.name in torchs]
    assert [p.name for p in shared] == [name for name in torchs if name in {p.name for p in ours}]
    assert [p.name for p in ours[: len(shared)]] == list(torchs)[1 : 1 + len(shared)]  # after `params`
    for parameter in shared:
        assert parameter.default == torchs[parameter.name].default, parameter.name
    assert case.make().defaults() == {p.name: p.default for p in ours}


def test_rules_are_frozen_and_can_be_sent_to_other_processes(case: Case) -> None:
    rule = case.make(lr=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, dataclasses.fields(rule)[0].name, 1.0)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert rule.defaults() is not rule.defaults()


def test_bad_options_are_refused_by_name_at_construction_and_after_edits(case: Case) -> None:
    for bad in case.bad_options:
        (value,) = bad.values()
        with pytest.raises(RuleError) as refusal:
            case.make(**bad)
        assert str(value) in str(refusal.value)
        with pytest.raises(ValueError):
            case.make().validate({**case.make().defaults(), **bad})
    assert issubclass(RuleError, FreeholdError)


def test_all_bad_options_are_reported_at_once(case: Case) -> None:
    options = case.make().defaults()
    if case.make().keeps_objects:
        pytest.skip("an optimizer of torch stops at the first option that it refuses")
    del options["eps"]
    with pytest.raises(RuleError, match=r"'eps' is missing") as refusal:
        case.make().validate({**options, "lr": -7.0, "weight_decay": -8.0, "unrelated": object()})
    assert "-7.0" in str(refusal.value)
    assert "-8.0" in str(refusal.value)
