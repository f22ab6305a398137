"""Which rule each param gets, and what the user may say about it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from freehold import AdamW, Group, LayerwiseOptimizer, Muon
from freehold.errors import PlanTypeError, RoutingError, RuleError, UnsupportedError
from freehold.runtime.routing import Route, check_tensors, named_params_of, route


def routes(model: object, *groups: Group) -> dict[str, Route]:
    module, trainable, _ = named_params_of(model)
    return {r.named.name: r for r in route(module, trainable, list(groups))}


def matrices(model: object, *groups: Group) -> set[str]:
    return {name for name, r in routes(model, *groups).items() if r.kind == "matrix"}


class LM(nn.Module):
    """Embedding, one hidden layer, head; ``head_first`` registers them the other way round."""

    def __init__(
        self, *, vocab: int = 32, width: int = 8, tied: bool = False, head_first: bool = False, head: str = "lm_head"
    ) -> None:
        super().__init__()
        parts = {
            "wte": nn.Embedding(vocab, width),
            "hidden": nn.Linear(width, width, bias=False),
            head: nn.Linear(width, vocab, bias=False),
        }
        if tied:
            parts[head].weight = parts["wte"].weight
        for name in sorted(parts, reverse=True) if not head_first else [head, "hidden", "wte"]:
            self.add_module(name, parts[name])


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("head", ["lm_head", "zz_out", "a"])
def test_embedding_and_head_are_elementwise_whatever_their_names_and_order(head: str, head_first: bool) -> None:
    assert matrices(LM(head=head, head_first=head_first)) == {"hidden.weight"}


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_weights_are_one_param_in_either_order(head_first: bool) -> None:
    found = routes(LM(tied=True, head_first=head_first))
    assert {name for name, r in found.items() if r.kind == "matrix"} == {"hidden.weight"}
    (tied,) = [r for r in found.values() if r.named.aliases]
    names = {tied.named.name, *tied.named.aliases}
    assert names == {"wte.weight", "lm_head.weight"}
    assert tied.kind == "elementwise"


def test_tied_weights_can_be_named_by_either_name() -> None:
    for pattern in ("wte.*", "lm_head.*"):
        assert matrices(LM(tied=True), Group(pattern, rule="matrix")) >= {"hidden.weight"}
        assert len(matrices(LM(tied=True), Group(pattern, rule="matrix"))) == 2


def test_embedding_bag_is_an_embedding() -> None:
    model = nn.Sequential(nn.EmbeddingBag(30, 8), nn.Linear(8, 4))
    assert matrices(model) == {"1.weight"}


class NamesItsHead(nn.Module):
    def __init__(self, *, answers: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.hidden = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 5)
        self.answers = answers

    def get_output_embeddings(self) -> nn.Module | None:
        if not self.answers:
            raise NotImplementedError
        return self.classifier


def test_get_output_embeddings_is_believed() -> None:
    assert matrices(NamesItsHead()) == {"hidden.weight"}


def test_a_model_without_output_embeddings_may_say_so() -> None:
    assert matrices(NamesItsHead(answers=False)) == {"hidden.weight", "classifier.weight"}


class Ambiguous(nn.Module):
    """vocab == d_model: by its size, every square projection could be the head."""

    def __init__(self, *, num_layers: int = 2, extra: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(16, 16), "up": nn.Linear(16, 64), "down": nn.Linear(64, 16)})
            for _ in range(num_layers)
        )
        if extra:
            self.pooler = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16, bias=False)


def test_head_where_vocab_equals_width() -> None:
    found = matrices(Ambiguous())
    assert found == {f"layers.{i}.{part}.weight" for i in range(2) for part in ("q", "up", "down")}


def test_several_candidates_where_vocab_equals_width_take_the_last_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="cannot be told"):
        found = matrices(Ambiguous(extra=True))
    assert "pooler.weight" in found
    assert "out.weight" not in found


def test_a_tied_head_where_vocab_equals_width_costs_no_projection() -> None:
    model = Ambiguous()
    model.out.weight = model.embed.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert matrices(model) == {f"layers.{i}.{part}.weight" for i in range(2) for part in ("q", "up", "down")}


def test_heads_of_multi_token_prediction() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(50, 8),
            "body": nn.Linear(8, 8),
            "heads": nn.ModuleList(nn.Linear(8, 50, bias=False) for _ in range(3)),
        }
    )
    assert matrices(model) == {"body.weight"}


@pytest.mark.parametrize(
    ("layer", "planned_shape"),
    [
        (nn.Conv1d(6, 4, 3), (4, 18)),
        (nn.Conv2d(3, 16, (5, 7)), (16, 105)),
        (nn.Conv3d(2, 4, 2), (4, 16)),
        (nn.ConvTranspose2d(3, 5, 2), (3, 20)),
        (nn.Conv2d(64, 64, 3, groups=64), (64, 9)),
    ],
    ids=["conv1d", "conv2d", "conv3d", "transposed", "depthwise"],
)
def test_a_convolution_is_one_matrix(layer: nn.Module, planned_shape: tuple[int, int]) -> None:
    found = routes(nn.Sequential(layer))
    assert (found["0.weight"].kind, found["0.weight"].planned_shape) == ("matrix", planned_shape)
    assert found["0.bias"].kind == "elementwise"


def test_a_stack_keeps_its_three_dimensions_and_one_of_vectors_is_no_matrix() -> None:
    model = nn.ParameterDict(
        {"experts": torch.zeros(4, 8, 16), "scale": torch.zeros(1, 1, 16), "temperature": torch.zeros(())}
    )
    found = routes(model)
    assert (found["experts"].kind, found["experts"].planned_shape) == ("matrix", (4, 8, 16))
    assert found["scale"].kind == "elementwise"
    assert found["temperature"].kind == "elementwise"


def test_norms_biases_and_frozen_params() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    model[2].weight.requires_grad_(False)
    assert matrices(model) == {"0.weight"}
    assert set(routes(model)) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.bias"}


def test_named_params_speak_by_shape_alone() -> None:
    model = LM()
    assert matrices(list(model.named_parameters())) == {"wte.weight", "hidden.weight", "lm_head.weight"}
    assert matrices(dict(model.named_parameters())) == {"wte.weight", "hidden.weight", "lm_head.weight"}


def test_the_first_group_that_matches_wins() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    found = routes(model, Group("0.*", rule="elementwise"), Group("*.weight"), Group("*.bias"))
    assert {name: r.group for name, r in found.items()} == {
        "0.weight": 0,
        "0.bias": 0,
        "1.weight": 1,
        "1.bias": 2,
        "2.weight": 1,
        "2.bias": 2,
    }
    assert {name for name, r in found.items() if r.kind == "matrix"} == {"1.weight"}


@pytest.mark.parametrize("pattern", ["*.wieght", "0.WEIGHT", "weight", "[z]*"])
def test_a_pattern_that_matches_nothing_raises(pattern: str) -> None:
    with pytest.raises(RoutingError, match="takes no param"):
        routes(nn.Sequential(nn.Linear(8, 8)), Group(pattern))


def test_a_group_whose_params_were_taken_by_earlier_ones_raises() -> None:
    with pytest.raises(RoutingError, match=r"Group\('0.weight'"):
        routes(nn.Sequential(nn.Linear(8, 8)), Group("*"), Group("0.weight"))


def test_all_routing_problems_are_told_at_once() -> None:
    with pytest.raises(RoutingError) as caught:
        routes(nn.Sequential(nn.Linear(8, 8)), Group("*.bias", rule="matrix"), Group("nope"), Group("nada"))
    for word in ("'0.bias' of shape (8,) is no matrix", "nope", "nada"):
        assert word in str(caught.value)


def test_a_head_can_be_forced_to_be_a_matrix_and_a_matrix_to_be_elementwise() -> None:
    assert matrices(LM(), Group("lm_head.weight", rule="matrix"), Group("hidden.*", rule="elementwise")) == {
        "lm_head.weight"
    }


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"pattern": ""}, PlanTypeError),
        ({"pattern": 3}, PlanTypeError),
        ({"pattern": "*", "rule": "muon"}, RoutingError),
    ],
)
def test_a_group_checks_its_arguments(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        Group(**arguments)  # type: ignore[arg-type]


def optimizer(model: object, *groups: Group) -> LayerwiseOptimizer:
    return LayerwiseOptimizer(
        model,  # type: ignore[arg-type]
        matrix=Muon(lr=0.02),
        elementwise=AdamW(lr=1e-3),
        groups=groups,
    )


def test_an_unknown_option_raises_and_says_what_there_is() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(RoutingError, match=r"\['beta'\].*AdamW.*'betas'"):
        optimizer(model, Group("*.bias", beta=0.5))
    with pytest.raises(RoutingError, match=r"\['betas'\].*Muon"):
        optimizer(model, Group("*.weight", betas=(0.9, 0.95)))


def test_an_option_out_of_range_raises() -> None:
    with pytest.raises(RuleError, match="learning rate"):
        optimizer(nn.Sequential(nn.Linear(8, 8)), Group("*.bias", lr=-1.0))


def test_param_groups_hold_the_options_and_empty_ones_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    opt = optimizer(model, Group("*.bias", weight_decay=0.0, lr=0.5), Group("0.*", momentum=0.5))
    seen = [
        (group["rule"], group["pattern"], len(group["params"]), group["lr"], group["weight_decay"])
        for group in opt.param_groups
    ]
    assert seen == [
        ("elementwise", "*.bias", 1, 0.5, 0.0),
        ("matrix", "0.*", 1, 0.02, 0.1),
        ("matrix", "*", 0, 0.02, 0.1),
        ("elementwise", "*", 0, 1e-3, 1e-2),
    ]
    assert opt.param_groups[1]["momentum"] == 0.5
    opt.close()


def test_the_routing_can_be_read_in_describe() -> None:
    opt = optimizer(LM(tied=True))
    text = opt.describe()
    for words in ("embedding 'wte'", "tied to", "hidden.weight"):
        assert words in text
    opt.close()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, 2, dtype=torch.complex64), "complex64"),
        (torch.zeros(0, 4), "no elements"),
        (torch.zeros(2, 2, device="meta"), "meta device"),
    ],
)
def test_params_that_cannot_be_laid_out(tensor: torch.Tensor, words: str) -> None:
    _, trainable, _ = named_params_of([("bad", nn.Parameter(tensor)), ("good", nn.Parameter(torch.zeros(2)))])
    with pytest.raises(UnsupportedError, match=f"'bad'.*{words}"):
        check_tensors(trainable)


def test_the_same_param_or_name_twice_raises() -> None:
    p, q = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(RoutingError, match="one Parameter given as 'a' and 'b'"):
        named_params_of([("a", p), ("b", p)])
    with pytest.raises(RoutingError, match="name 'a' given 2 times"):
        named_params_of([("a", p), ("a", q)])


@pytest.mark.parametrize("given", [{1, 2}, [torch.zeros(2)], [("a", torch.zeros(2))], 3, torch.zeros(2, 2), "model"])
def test_what_is_neither_model_nor_named_params(given: object) -> None:
    with pytest.raises(PlanTypeError):
        named_params_of(given)
