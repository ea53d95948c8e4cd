"""Attention by head and the four terms of the score, against softmaxes written out query by query."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests import laws
from tests.analyses.conftest import QUIET, run_of, text_and_inputs
from tests.calling import before
from tests.engine.training import MakeTokens
from tests.references import compressive_transformer as naive
from waveform.analyses import heads
from waveform.analyses.heads import attention_by_head
from waveform.analyses.layers import in_buckets, whole_pieces

CASES = [
    laws.Case("compressive_transformer", name)
    for name in ("conv", "conv-ragged", "conv-post-reference", "conv-autoencode-contiguous")
] + [laws.Case("transformer_xl", name) for name in ("pre", "post-reference", "no-memory")]


REGIONS = ("compressed", "memory", "window")


def written_out(layer: Any, config: Any, query: Any, seen: list[Any]) -> dict[str, np.ndarray]:
    """Softmaxes [H, slots] of all terms and of each, from the definition in section 3.3 of Dai et al. 2019."""
    attention, num_heads = layer.attention, config.num_heads
    q = (attention.query.weight @ naive._attention_input(layer, config, query.vector)).view(num_heads, -1)
    vectors = naive._attention_input(layer, config, torch.stack([slot.vector for slot in seen]))
    k = (vectors @ attention.key.weight.T).view(len(seen), num_heads, -1)
    sinusoids = q.new_tensor([naive._r(query.time - slot.time, config) for slot in seen])
    r = (sinusoids @ attention.position.weight.T).view(len(seen), num_heads, -1)
    products = partial(torch.einsum, "shd,hd->hs")
    terms = {"a": products(k, q), "b": products(r, q)}
    terms |= {"c": products(k, attention.content_bias), "d": products(r, attention.position_bias)}
    terms["all"] = sum(terms.values())
    return {name: torch.softmax(term / math.sqrt(q.shape[1]), -1).detach().numpy() for name, term in terms.items()}


@pytest.mark.parametrize("most_weights", [1, 2**24], ids=["one-row", "all-rows"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_written_out_softmaxes(
    case: laws.Case, most_weights: int, token_set: MakeTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = token_set([90])
    model = case.build()
    config, window = model.config, case.window
    monkeypatch.setattr(heads, "_MOST_WEIGHTS", most_weights)
    monkeypatch.setattr(heads, "MOST_BUCKETS", 7)
    figures = attention_by_head(run_of(model, window=window), tokens, max_tokens=90, **QUIET)
    lead = config.steps_to_full
    pieces, order = whole_pieces(tokens, lead + window, at_most=90 // (lead + window))
    assert figures["num_windows"] == len(order) >= 2

    calls: list[tuple[int, np.ndarray, np.ndarray, dict[str, np.ndarray]]] = []

    def note(layer: Any, config: Any, query: Any, memory: Any, seen: list[Any]) -> None:
        if query.time >= lead:
            slots = memory.compressed + memory.memory + seen
            place = next(i for i, other in enumerate(model.layers) if other is layer)
            regions = np.repeat(list(REGIONS), [len(memory.compressed), len(memory.memory), len(seen)])
            back = query.time - np.array([slot.time for slot in slots])
            calls.append((place, regions, back, written_out(layer, config, query, slots)))

    before(monkeypatch, naive, "_attend", note)
    for index in order:
        naive.run(model, config, text_and_inputs(pieces, index, start=0, stop=lead + window)[1])
    num_queries = len(order) * window
    assert len(calls) == num_queries * config.num_layers

    buckets = figures["buckets"]
    width = buckets[0]["to"] + 1
    by_head = np.zeros((config.num_layers, config.num_heads))
    share, distance = ({name: by_head.copy() for name in names} for names in (REGIONS, ("all", *"abcd")))
    weight = {name: np.zeros((*by_head.shape, len(buckets))) for name in distance}
    slots_seen = np.zeros(len(buckets))
    for layer, regions, back, softmaxes in calls:
        in_bucket = np.minimum(back // width, len(buckets) - 1)[:, None] == np.arange(len(buckets))
        slots_seen += (layer == 0) * in_bucket.sum(axis=0) / num_queries
        for region in REGIONS:
            share[region][layer] += softmaxes["all"][:, regions == region].sum(axis=1) / num_queries
        for name, softmax in softmaxes.items():
            weight[name][layer] += softmax @ in_bucket / num_queries
            distance[name][layer] += softmax @ back / num_queries
    np.testing.assert_allclose(figures["slots"], slots_seen, atol=1e-12)
    assert list(figures["share"]) == [region for region in REGIONS if region == "window" or getattr(config, region, 0)]
    for region, of_region in figures["share"].items():
        np.testing.assert_allclose(of_region, share[region], atol=1e-6, err_msg=region)
    for name, of_term in {"all": figures, **figures["terms"]}.items():
        np.testing.assert_allclose(of_term["weight"], weight[name], atol=1e-6, err_msg=name)
        np.testing.assert_allclose(of_term["mean_distance"], distance[name], rtol=1e-5, err_msg=name)
    assert list(figures["terms"]) == list("abcd")

    flat = np.array(figures["mean_distance"]).ravel()
    widest = figures["widest"]
    assert [flat[config.num_heads * e["layer"] + e["head"]] for e in widest] == sorted(flat)[::-1][: len(widest)]
    of_layer = [softmaxes["all"] for layer, _, _, softmaxes in calls if layer == widest[0]["layer"]]
    of_head = [softmax[widest[0]["head"]] for softmax in of_layer[-window:]]  # the last piece's
    num_slots = len(of_head[-1])
    rows = np.array([np.pad(row, (0, num_slots - len(row))) for row in of_head])
    np.testing.assert_allclose(widest[0]["weight"], in_buckets(rows, num_buckets=min(num_slots, 7)), atol=1e-6)


def test_a_head_that_looks_one_step_back_is_seen_to(token_set: MakeTokens) -> None:
    """By construction: v alone decides, and it prefers distance 1; the terms with a query are flat."""
    case = laws.Case("transformer_xl", "pre")
    run = run_of(case.build(), window=case.window)
    model: Any = run.model
    for layer in model.layers:
        attention = layer.attention
        for weight in (attention.query.weight, attention.key.weight):
            weight.zero_()
        attention.look_back()
        attention.position_bias.mul_(100)
    figures = attention_by_head(run, token_set([90]), max_tokens=90, **QUIET)
    weight = np.array(figures["weight"])
    assert (weight[:, 0, 0] > 0.99).all() and (weight[:, 1, 1] > 0.99).all()  # head 0 at itself, head 1 one step back
    assert list(figures["terms"]) == ["d"]  # the others are zero everywhere
    np.testing.assert_allclose(figures["terms"]["d"]["weight"], weight)


def test_a_model_without_attention_says_so(token_set: MakeTokens) -> None:
    wavenet = run_of(laws.Case("wavenet", "classic").build(), window=4)
    figures = attention_by_head(wavenet, token_set([90]), max_tokens=90, **QUIET)
    assert figures == {"absent": "the model has no attention"}
