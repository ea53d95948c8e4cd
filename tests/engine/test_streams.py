"""Streams: every token once an epoch, inputs shifted by one, resets where they belong, exact cursors, any ranks."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.laws import VOCAB_SIZE
from waveform.engine.errors import UserError
from waveform.engine.shards import TokenSet
from waveform.engine.streams import Chunk, TokenStream

LENGTHS = [13, 4, 40, 1, 22, 8, 17]


def stream(tokens: TokenSet, **options: object) -> TokenStream:
    return TokenStream(tokens, **{"batch_size": 2, "window": 4, "chunk": 8, "mode": "utterance", "seed": 3, **options})


def equal(a: Chunk, b: Chunk) -> bool:
    return a.num_scored == b.num_scored and all(
        torch.equal(getattr(x, name), getattr(y, name))
        for x, y in zip(a.windows, b.windows, strict=True)
        for name in ("inputs", "targets", "scored", "reset")
    )


@pytest.mark.parametrize("mode", ["utterance", "chunk", "carry"])
def test_an_epoch_scores_every_token_once(mode: str, token_set: Callable[..., TokenSet]) -> None:
    tokens = token_set(LENGTHS)
    s = stream(tokens, mode=mode)
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


def test_utterances_play_whole_with_shifted_inputs(token_set: Callable[..., TokenSet]) -> None:
    tokens = token_set(LENGTHS)
    s = stream(tokens, batch_size=1)
    played: list[list[int]] = []
    for _ in range(20):
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
    whole = [tokens.read(i, start=0, stop=10**6).tolist() for i in range(len(tokens))]
    assert sorted(played[: len(whole)]) == sorted(whole)


def test_chunk_mode_resets_at_every_chunk(token_set: Callable[..., TokenSet]) -> None:
    s = stream(token_set(LENGTHS), mode="chunk")
    for _ in range(10):
        first, second = s.next_chunk().windows
        assert first.reset.all() and not second.reset.any()
        assert (first.inputs[:, 0] == VOCAB_SIZE).all()


def test_carry_mode_joins_utterances_without_reset(token_set: Callable[..., TokenSet]) -> None:
    tokens = token_set(LENGTHS)
    s = stream(tokens, mode="carry", batch_size=3)
    joined = np.concatenate([tokens.read(i, start=0, stop=10**6) for i in range(len(tokens))])
    rows: list[list[int]] = [[], [], []]
    while s.epoch == 0:
        for window in s.next_chunk().windows:
            assert not window.reset.any()
            for row in range(3):
                rows[row] += window.targets[row][window.scored[row]].tolist()
    bounds = [i * len(joined) // 3 for i in range(4)]
    for row in range(3):
        part = joined[bounds[row] : bounds[row + 1]].tolist()
        assert rows[row][: len(part)] == part


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from(["utterance", "chunk", "carry"]), before=st.integers(0, 25), ranks=st.sampled_from([1, 2, 4])
)
def test_cursor_resumes_exactly_on_any_number_of_ranks(
    token_set: Callable[..., TokenSet], mode: str, before: int, ranks: int
) -> None:
    tokens = token_set(LENGTHS)
    whole = stream(tokens, mode=mode, batch_size=4)
    for _ in range(before):
        whole.next_chunk()
    parts = [stream(tokens, mode=mode, batch_size=4, rank=r, num_ranks=ranks) for r in range(ranks)]
    for part in parts:
        part.seek(whole.cursor())
    for _ in range(6):
        expected, got = whole.next_chunk(), [part.next_chunk() for part in parts]
        joined = Chunk(
            [
                type(w)(
                    *(
                        torch.cat([getattr(g.windows[i], f) for g in got])
                        for f in ("inputs", "targets", "scored", "reset")
                    )
                )
                for i, w in enumerate(expected.windows)
            ],
            got[0].num_scored,
        )
        assert equal(expected, joined)


def test_seed_decides_the_order(token_set: Callable[..., TokenSet]) -> None:
    tokens = token_set(LENGTHS)
    a, b, c = (stream(tokens, seed=seed) for seed in (1, 1, 2))
    chunks = [(a.next_chunk(), b.next_chunk(), c.next_chunk()) for _ in range(5)]
    assert all(equal(x, y) for x, y, _ in chunks)
    assert not all(equal(x, z) for x, _, z in chunks)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "never"}, "train.state"),
        ({"chunk": 10}, "multiple of the window"),
        ({"batch_size": 3, "num_ranks": 2}, "number of processes"),
        ({"batch_size": 1000, "mode": "carry"}, "too few"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    token_set: Callable[..., TokenSet], options: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        stream(token_set(LENGTHS), **options)
