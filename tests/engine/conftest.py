"""Small token sets and trainers for the engine's tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.laws import VOCAB_SIZE
from waveform.engine.shards import Shard, ShardWriter
from waveform.engine.token_set import TokenSet


def write_tokens(path: Path, lengths: list[int], *, seed: int = 0) -> TokenSet:
    """A token set of one shard: noisy repeating patterns, so that there is something to learn."""
    random = np.random.default_rng(seed)
    with ShardWriter(path, vocab_size=VOCAB_SIZE) as writer:
        for i, length in enumerate(lengths):
            pattern = (np.arange(length) * (1 + i % 3)) % VOCAB_SIZE
            noise = random.integers(0, VOCAB_SIZE, length)
            writer.write(f"utterance_{i:03d}", [np.where(random.random(length) < 0.9, pattern, noise)])
    return TokenSet([Shard(path)], vocab_size=VOCAB_SIZE)


@pytest.fixture
def token_set(tmp_path: Path) -> Callable[..., TokenSet]:
    """token_set([lengths]) -> TokenSet."""

    def make(lengths: list[int], **options: Any) -> TokenSet:
        return write_tokens(tmp_path / f"{len(list(tmp_path.glob('*.shard')))}.shard", lengths, **options)

    return make
