"""Utterances in rows: every token once, rows equally far, no row without an utterance, each with its own state."""

import numpy as np
import pytest
import torch

from tests import laws
from tests.engine.training import MakeTokens, small_model, utterances_of
from waveform.engine.single_pass import deal, score_once
from waveform.engine.token_set import TokenSet

LENGTHS = [13, 4, 40, 1, 22, 8, 17]
ORDER = [2, 4, 6, 0, 5, 1, 3]  # longest first


@pytest.mark.parametrize("order", [ORDER, list(range(7))])
@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_every_token_is_dealt_once_with_the_token_before_it(order: list[int], rows: int, tokens: TokenSet) -> None:
    inputs: list[list[int]] = [[] for _ in LENGTHS]
    targets: list[list[int]] = [[] for _ in LENGTHS]
    for dealt in deal(tokens, order, window=4, rows=rows):
        assert len(dealt.utterances) <= rows
        assert dealt.window.scored.any(dim=1).all()
        assert dealt.window.reset.tolist() == [dealt.start == 0] * len(dealt.utterances)
        for row, utterance in enumerate(dealt.utterances):
            assert dealt.start == len(targets[utterance])
            scored = dealt.window.scored[row]
            inputs[utterance] += dealt.window.inputs[row][scored].tolist()
            targets[utterance] += dealt.window.targets[row][scored].tolist()
    assert targets == utterances_of(tokens)
    assert inputs == [[laws.VOCAB_SIZE, *tokens[:-1]] for tokens in targets]


@pytest.mark.parametrize(
    ("order", "utterances", "kept"),
    [
        (ORDER, [*[[2, 4, 6]] * 3, *[[2]] * 2, [0, 5, 1], [0], [3]], [None, None, None, [0], None, None, [0], None]),
        (
            list(range(7)),  # rows that end first may stand anywhere
            [[0, 1, 2], [0, 2], *[[2]] * 3, [3, 4, 5], *[[4]] * 2, *[[6]] * 3],
            [None, [0, 2], [1], None, None, None, [1], None, None, None, None],
        ),
    ],
)
def test_rows_that_begin_together_are_dropped_as_they_end(
    order: list[int], utterances: list[list[int]], kept: list[list[int] | None], tokens: TokenSet
) -> None:
    dealt = list(deal(tokens, order, window=8, rows=3))
    assert [window.utterances for window in dealt] == utterances
    assert [window.rows for window in dealt] == kept


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_a_row_keeps_its_own_state_when_others_end(name: str, tokens: TokenSet) -> None:
    """Utterances in any order, side by side, against each of them alone."""
    model, window = small_model(name)

    def nats(rows: int) -> np.ndarray:
        sums = np.zeros(len(LENGTHS))
        with torch.inference_mode():
            windows = deal(tokens, range(len(LENGTHS)), window=window, rows=rows)
            for dealt, scores in score_once(model, windows, device=torch.device("cpu")):
                sums[dealt.utterances] += torch.where(scores.scored, scores.nll, 0).sum(dim=1).numpy()
        return sums

    np.testing.assert_allclose(nats(rows=3), nats(rows=1), rtol=1e-12)


def test_a_chunk_resets_every_row_at_once(token_set: MakeTokens) -> None:
    dealt = list(deal(token_set([20, 15]), [0, 1], window=4, rows=2, chunk=8))
    resets = [window.window.reset.tolist() for window in dealt]
    assert resets == [[True] * 2, [False] * 2, [True] * 2, [False] * 2, [True]]
    assert [reset[0] for reset in resets] == [window.window.inputs[0, 0] == laws.VOCAB_SIZE for window in dealt]


def test_one_stream_resets_once_and_is_never_padded(token_set: MakeTokens) -> None:
    tokens, order = token_set([6, 1, 9]), [2, 0, 1]
    dealt = list(deal(tokens, order, window=4, rows=None))
    assert [(window.utterances[0], window.start) for window in dealt] == [
        *[(2, 0), (2, 4), (2, 8)],
        *[(0, 0), (0, 3)],  # cut where the stream's third window ends
        (1, 0),
    ]
    assert all(window.window.scored.all() for window in dealt)
    assert [window.window.reset.tolist() for window in dealt] == [[True], *[[False]] * 5]
    targets = np.concatenate([window.window.targets[0] for window in dealt])
    assert targets.tolist() == np.concatenate([utterances_of(tokens)[i] for i in order]).tolist()
    inputs = np.concatenate([window.window.inputs[0] for window in dealt])
    begins = (0, 9, 15)  # as in training with state=carry, each utterance begins with its own input
    assert inputs.tolist() == [laws.VOCAB_SIZE if i in begins else targets[i - 1] for i in range(16)]
