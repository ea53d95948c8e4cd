"""Evaluation: every token once, equal to scoring each utterance alone; the three protocols; long memories."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from tests import laws
from tests.engine.training import MakeTokens, small_model, utterances_of
from waveform.engine import evaluator
from waveform.engine.dynamic import DynamicConfig, evaluate_dynamically
from waveform.engine.evaluator import EvaluateConfig, evaluate
from waveform.engine.metrics import bits, unigram_nll
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.system.errors import UserError
from waveform.system.progress import Progress

LENGTHS = [13, 4, 40, 1, 22, 8, 17]


@pytest.fixture(autouse=True)
def three_rows(monkeypatch: MonkeyPatch) -> None:
    """Fewer rows than utterances."""
    monkeypatch.setattr(evaluator, "fast_rows", lambda *arguments, **options: 3)


def nll(model: Any, *parts: Tensor) -> Tensor:
    """NLL of tokens that one pass of the model reads, each part after a begin-of-utterance input."""
    inputs = torch.cat([torch.cat([torch.tensor([laws.VOCAB_SIZE]), part[:-1]]) for part in parts])
    hidden = model(inputs[None], model.init_state(1, device="cpu", dtype=torch.float64)).hidden
    return -model.head.logits(hidden)[0].log_softmax(-1).gather(1, torch.cat(parts)[:, None])[:, 0]


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
@pytest.mark.parametrize("protocol", ["utterance", "chunk"])
def test_equals_scoring_each_utterance_alone(name: str, protocol: str, tokens: TokenSet) -> None:
    model, window = small_model(name)
    chunk = 3 * window
    cut = [torch.tensor(u).split(chunk if protocol == "chunk" else len(u)) for u in utterances_of(tokens)]
    expected = [sum(float(nll(model, part).sum()) for part in parts) for parts in cut]
    result = evaluate(model, tokens, EvaluateConfig(window=window, protocol=protocol, chunk=chunk))
    # The head's cross-entropy may be fp32 or better; sums are fp64.
    np.testing.assert_allclose(result.nats, expected, rtol=1e-6)
    assert result.counts.tolist() == LENGTHS
    assert result.nats_per_token == pytest.approx(sum(expected) / sum(LENGTHS), rel=1e-6)
    assert result.bits_per_token == bits(result.nats_per_token)


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_carried_state_never_resets(name: str, tokens: TokenSet) -> None:
    """One pass of the model over all utterances, joined in the set's order."""
    model, window = small_model(name)
    config = EvaluateConfig(window=window, protocol="carry")
    result = evaluate(model, tokens, config)
    expected = [float(part.sum()) for part in nll(model, *map(torch.tensor, utterances_of(tokens))).split(LENGTHS)]
    np.testing.assert_allclose(result.nats, expected, rtol=1e-6)
    assert result.counts.tolist() == LENGTHS and result.protocol == "carry"
    alone = evaluate(model, tokens, replace(config, protocol="utterance"))
    assert alone.nats[0] == pytest.approx(result.nats[0]) and abs(alone.nats - result.nats)[1:].max() > 1e-3
    still = evaluate_dynamically(model, tokens, config, DynamicConfig(lr=0.0), world=World())
    np.testing.assert_allclose(still.nats, result.nats, rtol=1e-9)


def test_one_stream_is_scored_by_the_first_process(tokens: TokenSet, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(World, "sum_", lambda world, tensor: tensor)
    model, _ = small_model("wavenet")
    config = EvaluateConfig(window=4, protocol="carry", max_tokens=99)
    shares = [evaluate(model, tokens, config, world=World(rank=rank, size=2)).counts for rank in range(2)]
    assert [share.tolist() for share in shares] == [LENGTHS, [0] * 7]
    first = evaluate(model, tokens, replace(config, max_tokens=20))  # the first of the stream, not the longest
    assert first.counts.tolist() == [13, 4, 40, 0, 0, 0, 0]


@pytest.mark.parametrize("protocol", ["utterance", "carry"])
def test_progress_counts_what_all_processes_score(protocol: str, tokens: TokenSet, monkeypatch: MonkeyPatch) -> None:
    """The first one shows it; the others' shares take about as long."""
    monkeypatch.setattr(World, "sum_", lambda world, tensor: tensor)
    model, _ = small_model("wavenet")
    progress = Progress("evaluate", total=sum(LENGTHS), unit="token", enabled=False)
    config = EvaluateConfig(window=4, protocol=protocol, max_tokens=sum(LENGTHS))
    evaluate(model, tokens, config, world=World(size=2), progress=progress)
    assert progress._done == pytest.approx(sum(LENGTHS))


def test_a_quick_look_is_spread_over_the_set(token_set: MakeTokens) -> None:
    model, _ = small_model("wavenet")
    tokens = token_set([100, *[10] * 30])
    look = evaluate(model, tokens, EvaluateConfig(window=4, max_tokens=120))
    scored = np.flatnonzero(look.counts)
    assert 100 < look.counts.sum() <= 220 and scored.max() > 25 and len(scored) > 2  # not the long one alone
    assert set(np.diff(scored)[1:]) <= {3, 4}
    whole = evaluate(model, tokens, EvaluateConfig(window=4, max_tokens=10**6))
    assert whole.counts.tolist() == tokens.lengths
    np.testing.assert_allclose(look.nats[scored], whole.nats[scored], rtol=1e-6)


def test_unigram_is_the_smoothed_histogram() -> None:
    train, test = np.array([2, 0]), np.array([1, 1])
    assert unigram_nll(train, test) == pytest.approx(-(np.log(3 / 4) + np.log(1 / 4)) / 2)


def test_protocols_are_checked() -> None:
    with pytest.raises(UserError, match="protocol"):
        EvaluateConfig(window=4, protocol="never")
    with pytest.raises(UserError, match="multiple of the window"):
        EvaluateConfig(window=4, protocol="chunk", chunk=6)


def test_sums_by_class_split_the_whole(tokens: TokenSet) -> None:
    model, _ = small_model("wavenet")
    classes = torch.tensor([0, 2, 1] * 4)[: laws.VOCAB_SIZE]
    result = evaluate(model, tokens, EvaluateConfig(window=4), classes=classes)
    expected = np.zeros(3)
    for whole in map(torch.tensor, utterances_of(tokens)):
        np.add.at(expected, classes[whole].numpy(), nll(model, whole).numpy())
    np.testing.assert_allclose(result.class_nats, expected, rtol=1e-6)
    assert result.class_counts.tolist() == [int(tokens.counts[classes.numpy() == c].sum()) for c in range(3)]
    assert result.class_nats.sum() == pytest.approx(result.nats.sum())


def test_a_cut_set_scores_every_token_once(tokens: TokenSet) -> None:
    """Each piece is scored as if it were an utterance: the same tokens, fresh state at each cut."""
    model, _ = small_model("wavenet")
    pieces = tokens.cut(9)
    assert max(pieces.lengths) == 9 and pieces.num_tokens == tokens.num_tokens
    assert pieces.names[:3] == ["utterance_000#000000", "utterance_000#000001", "utterance_001"]
    assert np.array_equal(*(np.concatenate(utterances_of(each)) for each in (tokens, pieces)))
    cut = evaluate(model, pieces, EvaluateConfig(window=3))
    # Resets every 9 tokens are what the protocol `chunk` does too.
    whole = evaluate(model, tokens, EvaluateConfig(window=3, protocol="chunk", chunk=9))
    assert cut.nats.sum() == pytest.approx(whole.nats.sum())
