"""NLL over the course of an utterance, against the NLL of whole utterances that are read in one call."""

import numpy as np
import pytest

from tests import laws
from tests.analyses.conftest import nll_of, run_of
from tests.engine.training import MakeTokens
from waveform.analyses.nll_by_place import NllByPlace, nll_by_place
from waveform.ranks.distributed import World


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_sums_of_places_are_those_of_whole_utterances(name: str, token_set: MakeTokens) -> None:
    case = laws.Case(name, next(iter(laws.CONFIGS[name])))
    model = case.build()
    lengths = [50, 7, 23, 40]
    tokens = token_set(lengths)
    found = nll_by_place(run_of(model, window=case.window), tokens, first=5, max_tokens=None, world=World())
    assert list(found.edges) == [0, 5, 10, 20, 40, 80]
    for i, length in enumerate(lengths):
        expected = nll_of(tokens, i, model, start=0, stop=length).numpy()
        parts = [expected[low:high] for low, high in zip(found.edges, found.edges[1:], strict=False)]
        assert found.counts[i].tolist() == [len(part) for part in parts]
        np.testing.assert_allclose(found.nats[i], [part.sum() for part in parts], rtol=1e-6)


def test_the_longest_that_fit_are_read(token_set: MakeTokens) -> None:
    run = run_of(laws.Case("wavenet", "classic").build(), window=4)
    for most, expected in ((45, [0, 30, 0, 12]), (29, [0, 0, 0, 12]), (5, [0, 0, 0, 12])):
        found = nll_by_place(run, token_set([50, 30, 50, 12]), first=8, max_tokens=most, world=World())
        assert found.counts.sum(axis=1).tolist() == expected
        assert found.counts.sum(axis=0).all()  # no bin beyond them


def test_figures_are_means_with_intervals() -> None:
    counts = np.array([[4, 8], [4, 8], [4, 6], [4, 2], [4, 0], [4, 0]])
    random = np.random.default_rng(0)
    easy = NllByPlace([0, 4, 12], counts * random.uniform(1, 2, (6, 1)), counts)
    figures = easy.figures()
    assert figures["num_utterances"] == [6, 4] and figures["edges"] == [0, 4, 12]
    assert figures["nats"] == pytest.approx((easy.nats.sum(axis=0) / counts.sum(axis=0)).tolist())
    low, high = figures["interval_95"][0]
    assert low < figures["nats"][0] < high and high - low > 0.1
    assert figures["interval_95"][1] is None  # four utterances say too little
    # Utterances that differ a lot, and models that differ by the same everywhere: the paired interval is narrow.
    difference = NllByPlace(easy.edges, easy.nats + 0.25 * counts, counts).minus(easy).figures()
    assert difference["nats"] == pytest.approx([0.25, 0.25])
    assert difference["interval_95"][0] == pytest.approx([0.25, 0.25])
