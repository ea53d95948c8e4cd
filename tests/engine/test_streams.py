"""Streams: every token once per epoch, inputs shifted by one, correct resets, exact cursors, any number of ranks."""

import json
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.training import MakeTokens, utterances_of
from tests.laws import VOCAB_SIZE
from waveform.engine.streams import TokenStream, check_sizes
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import World
from waveform.system.errors import UserError

LENGTHS = [13, 4, 40, 1, 22, 8, 17]


def stream(
    tokens: TokenSet, *, window: int = 4, seed: int = 3, world: World | None = None, **train: object
) -> TokenStream:
    config = TrainConfig(**{"batch_size": 2, "chunk": 8, **train})
    return TokenStream(tokens, config, window=window, seed=seed, world=world or World())


@pytest.mark.parametrize("mode", ["utterance", "chunk", "carry"])
def test_an_epoch_scores_every_token_once(mode: str, tokens: TokenSet) -> None:
    s = stream(tokens, state=mode, **({"batch_size": 3, "window": 5, "chunk": 5} if mode == "carry" else {}))
    seen: Counter[int] = Counter()
    scored = 0
    while scored < sum(LENGTHS):
        chunk = s.next_chunk()
        scored += chunk.num_scored
        for window in chunk.windows:
            assert not window.targets[~window.scored].any()
            seen.update(window.targets[window.scored].tolist())
    assert scored == sum(LENGTHS) or mode != "carry"
    if scored == sum(LENGTHS):
        assert [seen[c] for c in range(VOCAB_SIZE)] == tokens.counts.tolist()


def test_utterances_play_whole_with_shifted_inputs(tokens: TokenSet) -> None:
    s = stream(tokens, batch_size=1)
    played: list[list[int]] = []
    for _ in range(30):
        for window in s.next_chunk().windows:
            n = int(window.scored.sum())
            inputs, targets = window.inputs[0, :n].tolist(), window.targets[0, :n].tolist()
            if window.reset[0]:
                assert inputs[0] == VOCAB_SIZE
                played.append([])
            else:
                assert inputs[0] == played[-1][-1]
            assert inputs[1:] == targets[:-1]
            played[-1] += targets
    first, second = played[: len(LENGTHS)], played[len(LENGTHS) : 2 * len(LENGTHS)]
    assert sorted(first) == sorted(second) == sorted(utterances_of(tokens)) and first != second


def test_chunk_mode_resets_at_every_chunk(tokens: TokenSet) -> None:
    s = stream(tokens, state="chunk")
    for _ in range(10):
        first, second = s.next_chunk().windows
        assert first.reset.all() and not second.reset.any()
        assert (first.inputs[:, 0] == VOCAB_SIZE).all()


def test_carry_mode_joins_utterances_without_reset(tokens: TokenSet, token_set: MakeTokens) -> None:
    s = stream(tokens, state="carry", batch_size=3)
    joined, rows = np.concatenate(utterances_of(tokens)), []
    while s.epoch < 2:
        for window in s.next_chunk().windows:
            assert not window.reset.any() and window.scored.all()
            rows.append(window.targets)
    bounds = [i * len(joined) // 3 for i in range(4)]
    for row, (start, stop) in zip(torch.cat(rows, dim=1).tolist(), pairwise(bounds), strict=True):
        assert row == np.resize(joined[start:stop], len(row)).tolist()  # again and again
    short = stream(token_set([5]), state="carry")  # the first row has two tokens
    short.next_chunk()
    assert short.epoch == 4


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_stream_resumes_exactly_from_its_cursor(token_set: MakeTokens, data: st.DataObject) -> None:
    """Any stream resumes exactly, at any place and on any number of ranks, even after a JSON round trip."""
    mode = data.draw(st.sampled_from(["utterance", "chunk", "carry"]))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    batch_size, window = data.draw(st.sampled_from([1, 2, 4, 6])), data.draw(st.integers(1, 7))
    assume(mode != "carry" or sum(lengths) >= batch_size)
    options = {"state": mode, "batch_size": batch_size, "window": window, "seed": data.draw(st.integers(0, 2**31 - 1))}
    options["chunk"] = window * data.draw(st.integers(1, 3))
    ranks = st.sampled_from([n for n in (1, 2, 3, 6) if batch_size % n == 0])
    tokens = token_set(lengths)

    def streams(num_ranks: int) -> list[TokenStream]:
        return [stream(tokens, world=World(rank, num_ranks), **options) for rank in range(num_ranks)]

    def next_of(parts: list[TokenStream]) -> list[Tensor]:
        chunks = [part.next_chunk() for part in parts]
        num_whole = sum(int(window.whole.sum()) for chunk in chunks for window in chunk.windows)
        num_scored = sum(int(window.scored.sum()) for chunk in chunks for window in chunk.windows)
        assert {(chunk.num_scored, chunk.num_whole) for chunk in chunks} == {(num_scored, num_whole)}
        windows = zip(*(chunk.windows for chunk in chunks), strict=True)
        names = ("inputs", "targets", "scored", "reset")
        return [torch.cat([getattr(w, name) for w in rows]) for rows in windows for name in names]

    before = streams(data.draw(ranks))
    for _ in range(data.draw(st.integers(0, 15))):
        next_of(before)
    cursors = [json.dumps(part.cursor()) for part in before]
    assert len(set(cursors)) == 1  # ranks agree
    after = streams(data.draw(ranks))
    for part in after:
        part.seek(json.loads(cursors[0]))
    for _ in range(8):
        assert all(torch.equal(a, b) for a, b in zip(next_of(before), next_of(after), strict=True))
    assert before[0].cursor() == after[0].cursor()


@pytest.mark.parametrize("mode", ["utterance", "chunk", "carry"])
@pytest.mark.parametrize(
    "change",
    [
        {"mode": "other"}, {"epoch": -1}, {"epoch": 1.5}, {"taken": 99}, {"taken": None}, {"item": [0]}, {"item": 0},
        {"item": [0, 7]}, {"item": [-2, 0]}, {"start": [0, -1]}, {"start": [0, 999]}, {"start": ["0", 0]},
    ],
)  # fmt: skip
def test_a_cursor_of_something_else_is_refused(tokens: TokenSet, mode: str, change: dict[str, object]) -> None:
    s = stream(tokens, state=mode)
    s.next_chunk()
    with pytest.raises(UserError, match="position"):
        s.seek({**s.cursor(), **change})


def test_seed_decides_the_order(tokens: TokenSet) -> None:
    def read(seed: int) -> list[Any]:
        chunks = [stream(tokens, seed=seed).next_chunk() for _ in range(5)]
        return [[part.tolist() for part in vars(window).values()] for chunk in chunks for window in chunk.windows]

    assert read(1) == read(1) != read(2)


def test_sizes_that_do_not_fit_are_refused(tokens: TokenSet) -> None:
    with pytest.raises(UserError, match="multiple of the window"):
        stream(tokens, chunk=10)
    with pytest.raises(UserError, match="number of processes"):
        stream(tokens, batch_size=3, world=World(0, 2))
    with pytest.raises(UserError, match="too few"):
        stream(tokens, batch_size=1000, state="carry")


@pytest.mark.parametrize("size", [{"chunk": 2**40}, {"batch_size": 2**40}, {"update_period": 2**40}])
def test_chunks_that_the_machine_cannot_hold_are_refused(size: dict[str, int]) -> None:
    says = "the tokens of an update would take .* GB, .*; lower train.batch_size, train.chunk or train.update_period"
    with pytest.raises(UserError, match=says):
        check_sizes(SimpleNamespace(**{"batch_size": 2, "chunk": 8, "update_period": 1, **size}), window=4, num_ranks=1)


@pytest.mark.parametrize("mode", ["utterance", "carry"])
def test_a_window_may_be_scored_from_some_place_on(mode: str, tokens: TokenSet) -> None:
    whole, part = (stream(tokens, state=mode, batch_size=3, loss_share=share) for share in (1.0, 0.25))
    for _ in range(12):
        full, late = whole.next_chunk(), part.next_chunk()
        for a, b in zip(full.windows, late.windows, strict=True):
            assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
            assert torch.equal(b.scored[:, 3:], a.scored[:, 3:]) and not b.scored[:, :3].any()
        assert late.num_scored == sum(int(window.scored.sum()) for window in late.windows)
