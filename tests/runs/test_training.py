"""Training into a run folder, for any modality: the validation set of a quick look."""

from pathlib import Path

import pytest

from tests.engine.conftest import write_tokens
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import World
from waveform.runs.training import cut_for_a_look


@pytest.mark.parametrize(
    ("evaluate_tokens", "num_ranks", "longest"), [(None, 1, 65), (400, 1, 25), (400, 2, 13), (5000, 2, 33), (0, 1, 65)]
)
def test_a_look_has_several_rows(evaluate_tokens: int | None, num_ranks: int, longest: int, tmp_path: Path) -> None:
    valid = write_tokens(tmp_path / "a.shard", [1000, 30])
    pieces = cut_for_a_look(valid, TrainConfig(evaluate_tokens=evaluate_tokens), world=World(size=num_ranks))
    assert pieces.num_tokens == 1030 and len(pieces) >= 16 * num_ranks
    assert max(pieces.lengths) == longest
