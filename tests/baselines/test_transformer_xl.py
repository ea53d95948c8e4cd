"""Transformer-XL against the published formula: the reference of the Compressive Transformer, which contains it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baselines.transformer_xl import TransformerXL
from tests import laws
from tests.references import compressive_transformer as reference
from waveform.models.compressive_transformer import CompressiveTransformer

SIZES: dict[str, Any] = {  # every one different
    **{"vocab_size": laws.VOCAB_SIZE, "num_layers": 2, "d_model": 12, "num_heads": 3, "d_feedforward": 20},
    "num_position_features": 8,
}


def build(cls: Any, **fields: Any) -> Any:
    torch.manual_seed(0)
    return laws.randomise(cls(cls.Config(**{**SIZES, **fields})))


def implementations(model: Any) -> Iterator[str]:
    """Has the model compute attention in each way in turn, so that its reference runs once."""
    for name in ("fused", "reference"):
        for layer in model.layers:
            assert layer.attention.implementation in ("fused", "reference")
            layer.attention.implementation = name
        yield name


def outputs(model: Any, tokens: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    return laws.run(model, tokens, laws.fresh_state(model, len(tokens)), cuts)[0]


def assert_gradient_of_the_task(model: Any, *runs: list[int], through_time: bool = False) -> None:
    """Hidden vectors and the gradient of every parameter that the task reaches are the reference's, in all runs."""
    model.carry_gradient = through_time
    tokens = laws.random_tokens(sum(runs[0]))
    weights = torch.randn(*tokens.shape, model.config.d_model, dtype=torch.float64)
    expected = reference.run(model, model.config, tokens, cut_gradient=not through_time).hidden
    trunk = {n: p for n, p in laws.split_parameters(model)[0].items() if not n.startswith("head.")}
    for _ in implementations(model):
        for cuts in runs:
            actual = outputs(model, tokens, cuts)
            laws.assert_same(actual, expected)
            laws.assert_same_gradients((weights * actual).sum(), (weights * expected).sum(), trunk)


# How published weights differ from the default, each alone and all together.
PUBLISHED: dict[str, dict[str, Any]] = {
    "default": {},
    "no memory": {"memory": 0},
    "short memory": {"memory": 3},
    "post": {"norm": "post"},
    "post, long memory": {"norm": "post", "memory": 12},
    "relu": {"activation": "relu"},
    "same length": {"same_length": True},
    "same length, shorter than the window": {"same_length": True, "memory": 3},
    "clamped": {"clamp_len": 4},
    "clamped beyond the window": {"clamp_len": 9, "memory": 12},
    "all": {"activation": "relu", "same_length": True, "clamp_len": 4, "norm": "post"},
}


@pytest.mark.parametrize("option", PUBLISHED)
def test_gradient_equals_published_formula(option: str) -> None:
    model = build(TransformerXL, **{"window": 5, "memory": 7, **PUBLISHED[option]})
    assert_gradient_of_the_task(model, laws.even_cuts(33, 5))


def check_reach(model: Any, *, last: int, edge: int) -> None:
    """The input at `edge` changes the output at `last`, and the one before it changes nothing."""
    tokens = laws.random_tokens(last + 1, batch_size=1).repeat(3, 1)
    for row, position in ((1, edge), (2, edge - 1)):
        tokens[row, position] = (tokens[row, position] + 1) % laws.VOCAB_SIZE
    with torch.no_grad():
        original, inside, outside = (model(row[None], laws.fresh_state(model, 1)).hidden[0, last] for row in tokens)
    assert (inside - original).abs().max() > 1e-13
    assert torch.equal(outside, original)


def test_same_length_reaches_as_far_from_every_step() -> None:
    model = build(TransformerXL, window=4, memory=6, same_length=True)
    assert model.receptive_field == 6
    check_reach(model, last=29, edge=29 - 2 * 5)


@pytest.mark.parametrize("compression", ["max", "mean"])
def test_pooling_at_rate_one_is_a_longer_memory(compression: str) -> None:
    model = build(TransformerXL, window=4, memory=9)
    pooling = {"compression": compression, "compression_rate": 1}
    compressive = build(CompressiveTransformer, window=4, memory=4, compressed=5, **pooling)
    compressive.load_state_dict(model.state_dict(), strict=False)
    tokens, cuts = laws.random_tokens(33), laws.ragged_cuts(33, longest=9)
    with torch.no_grad():
        for _ in zip(implementations(model), implementations(compressive), strict=True):
            laws.assert_same(outputs(compressive, tokens, cuts), outputs(model, tokens, cuts))
