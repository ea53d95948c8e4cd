"""Attention by position and compression loss by layer, against written-out softmaxes and losses."""

from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from tests import laws
from tests.analyses.conftest import QUIET, run_of, text_and_inputs
from tests.engine.training import MakeTokens
from tests.references import compressive_transformer as naive
from waveform.analyses.layers import (
    LayerObservations,
    attention_by_position,
    compression_loss_by_layer,
    in_buckets,
    observe_layers,
)
from waveform.engine.token_set import TokenSet
from waveform.system.errors import UserError

CASES = [
    laws.Case("compressive_transformer", name)
    for name in ("conv", "conv-ragged", "conv-post-reference", "conv-autoencode-contiguous", "dilated", "most-used")
] + [laws.Case("transformer_xl", name) for name in ("pre", "post-reference")]


def observe(model: Any, tokens: TokenSet, *, window: int, max_tokens: int | None = None) -> LayerObservations:
    """What is observed, after which nothing is hooked to the model."""
    observed = observe_layers(run_of(model, window=window), tokens, max_tokens=max_tokens or tokens.num_tokens, **QUIET)
    assert isinstance(observed, LayerObservations), observed
    assert not any(module._forward_hooks for module in model.modules())
    return observed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_written_out_weights_and_losses(
    case: laws.Case, token_set: MakeTokens, monkeypatch: MonkeyPatch
) -> None:
    tokens = token_set([170])
    model, window = case.build(), case.window
    observed = observe(model, tokens, window=window, max_tokens=140)
    config, lead = model.config, observed.full_after
    length = lead + observed.num_windows * window
    pieces = tokens.cut(length)
    whole = [i for i, n in enumerate(pieces.lengths) if n == length]
    num = len(observed.received)
    chosen = [whole[int(i)] for i in np.linspace(0, len(whole) - 1, num)]
    assert num >= 2

    weights: list[tuple[Any, list[float]]] = []
    losses: list[float] = []
    attend, end_window = naive._attend, naive._end_window

    def spy_on_attention(layer: Any, config: Any, query: Any, memory: Any, seen: Any) -> Any:
        out = attend(layer, config, query, memory, seen)
        weights.append((layer, [float(slot.received[-1]) for slot in memory.compressed + memory.memory + seen]))
        return out

    def spy_on_loss(*args: Any, **kwargs: Any) -> Any:
        loss = end_window(*args, **kwargs)
        losses.append(float(loss))
        return loss

    monkeypatch.setattr(naive, "_attend", spy_on_attention)
    monkeypatch.setattr(naive, "_end_window", spy_on_loss)
    for row, index in enumerate(chosen):
        weights.clear(), losses.clear()
        naive.run(model, config, text_and_inputs(pieces, index, start=0, stop=length)[1])
        expected = np.zeros((config.num_layers, config.compressed + config.memory + window))
        for i, layer in enumerate(model.layers):
            of_layer = [weight for owner, weight in weights if owner is layer][lead:]
            assert len(of_layer) == observed.num_windows * window
            for weight in of_layer:
                assert sum(weight) == pytest.approx(1)
                expected[i, : len(weight)] += np.array(weight) / len(of_layer)
        np.testing.assert_allclose(observed.received[row], expected, atol=1e-9)
        by_window = np.array(losses).reshape(-1, config.num_layers)[lead // window :]
        if observed.losses is None:
            assert not by_window.any()
        else:
            np.testing.assert_allclose(observed.losses[row], by_window.mean(axis=0), rtol=1e-9)


def without_queries(model: Any) -> None:
    """Have every slot that is seen get the same weight."""
    for layer in model.layers:
        for part in (layer.attention.query, layer.attention.key, layer.attention.position):
            part.weight.detach().zero_()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_buckets_sum_to_one_and_pairs_are_unbiased(case: laws.Case, token_set: MakeTokens) -> None:
    model, tokens = case.build(), token_set([300, 200])
    observed = observe(model, tokens, window=case.window)
    without_queries(model)
    flat = observe(model, tokens, window=case.window)
    for seen in (observed, flat):
        figures = attention_by_position(seen)
        for regions in (figures["regions"], *figures["by_layer"]):
            assert sum(sum(entry["weight"]) for entry in regions.values()) == pytest.approx(1)
            for entry in regions.values():
                assert len(entry["weight"]) == 6 == len(entry["weight_standard_error"])
    regions = attention_by_position(flat)["regions"]
    past = [w for name in regions if name != "window" for w in regions[name]["weight_per_slot"]]
    np.testing.assert_allclose(past, past[0], rtol=1e-9)
    window, slots = model.config.window, regions["memory"]["slots"] + model.config.compressed
    assert past[0] == pytest.approx(np.mean([1 / (slots + i + 1) for i in range(window)]))
    # Later slots of the window get less in all, because fewer queries see them; the one that sees the last sees all.
    in_window = regions["window"]
    assert in_window["weight"] == sorted(in_window["weight"], reverse=True)
    assert in_window["weight"][-1] < 0.6 * in_window["weight"][0]
    assert in_window["weight_per_slot"][-1] == pytest.approx(1 / (slots + window))


@pytest.mark.parametrize("variant", ["same-length", "same-length-short"])
def test_a_pair_is_a_query_and_a_slot_that_it_sees(variant: str, token_set: MakeTokens) -> None:
    """Without queries, each that sees the last `memory` steps gives all of them the same weight."""
    case = laws.Case("transformer_xl", variant)
    model: Any = case.build()
    without_queries(model)
    regions = attention_by_position(observe(model, token_set([300]), window=case.window))["regions"]
    per_slot = np.array([regions[name]["weight_per_slot"] for name in ("memory", "window")])
    np.testing.assert_allclose(per_slot[per_slot > 0], 1 / model.config.memory)
    assert (per_slot == 0).sum() <= 2  # buckets of the oldest slot of memory, which no query sees


def test_what_is_not_there_is_said(token_set: MakeTokens) -> None:
    tokens = token_set([300])
    for case in (laws.Case("transformer_xl", "pre"), laws.Case("compressive_transformer", "max-tied")):
        observed = observe(case.build(), tokens, window=case.window)
        assert "no compressor" in compression_loss_by_layer(observed, kind="none")["absent"]
    observed = observe(CASES[-1].build(), tokens, window=CASES[-1].window)
    assert "compressed" not in attention_by_position(observed)["regions"]
    model = CASES[0].build()
    run = run_of(model, window=CASES[0].window)
    said = observe_layers(run, token_set([model.config.steps_to_full + 1] * 9), max_tokens=300, **QUIET)
    assert isinstance(said, str) and "no utterance is long enough" in said
    with pytest.raises(UserError, match="filling the memories takes 12; give at least 16"):
        observe_layers(run, tokens, max_tokens=15, **QUIET)


def test_buckets_share_what_lies_on_an_edge() -> None:
    three = in_buckets(np.array([1.0, 2.0, 4.0, 8.0]), num_buckets=3)
    np.testing.assert_allclose(three, [1 + 2 / 3, 4 / 3 + 8 / 3, 4 / 3 + 8])
    np.testing.assert_allclose(in_buckets(np.arange(12.0)), [1, 5, 9, 13, 17, 21])
    np.testing.assert_allclose(in_buckets(np.array([6.0])), np.ones(6))
