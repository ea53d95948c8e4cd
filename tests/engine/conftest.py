"""Small token sets and trainers for the engine's tests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.laws import VOCAB_SIZE
from waveform.engine.shards import Shard, ShardWriter
from waveform.engine.token_set import TokenSet


def write_utterances(path: Path, utterances: Sequence[np.ndarray], *, vocab_size: int = VOCAB_SIZE) -> TokenSet:
    """A token set of one shard."""
    with ShardWriter(path, vocab_size=vocab_size) as writer:
        for i, utterance in enumerate(utterances):
            writer.write(f"utterance_{i:03d}", [utterance])
    return TokenSet([Shard(path)], vocab_size=vocab_size)


def write_tokens(path: Path, lengths: Sequence[int]) -> TokenSet:
    """A token set of one shard: noisy repeating patterns, so that there is something to learn."""
    random, utterances = np.random.default_rng(0), []
    for i, length in enumerate(lengths):
        pattern = (np.arange(length) * (1 + i % 3)) % VOCAB_SIZE
        noise = random.integers(0, VOCAB_SIZE, length)
        utterances.append(np.where(random.random(length) < 0.9, pattern, noise))
    return write_utterances(path, utterances)


@pytest.fixture
def token_set(tmp_path: Path) -> Callable[[list[int]], TokenSet]:
    """Makes token sets of utterances of these lengths."""
    return lambda lengths: write_tokens(tmp_path / f"{len(list(tmp_path.glob('*.shard')))}.shard", lengths)


@pytest.fixture
def tokens(request: pytest.FixtureRequest, tmp_path: Path) -> TokenSet:
    """A token set of utterances as long as LENGTHS of the test's module says."""
    return write_tokens(tmp_path / "tokens.shard", request.module.LENGTHS)
