"""Training into a run folder, for any modality: the validation set of a quick look."""

from pathlib import Path

import numpy as np
import pytest

from waveform.engine.shards import Shard, ShardWriter
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import World
from waveform.runs.training import cut_for_a_look


@pytest.mark.parametrize(
    ("evaluate_tokens", "num_ranks", "longest"), [(None, 1, 65), (400, 1, 25), (400, 2, 13), (5000, 2, 33), (0, 1, 65)]
)
def test_a_look_has_several_rows(evaluate_tokens: int | None, num_ranks: int, longest: int, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.shard", vocab_size=3) as writer:
        for name, length in (("long", 1000), ("short", 30)):
            writer.write(name, [np.ones(length, dtype=np.uint8)])
    valid = TokenSet([Shard(tmp_path / "a.shard")], vocab_size=3)
    pieces = cut_for_a_look(valid, TrainConfig(evaluate_tokens=evaluate_tokens), world=World(size=num_ranks))
    assert pieces.num_tokens == 1030 and len(pieces) >= 16 * num_ranks
    assert max(pieces.lengths) == longest
