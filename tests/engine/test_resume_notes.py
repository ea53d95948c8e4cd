"""What a resumed run is told, by what its checkpoint says of the conditions that it was saved under."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.training import MakeTokens, small_trainer
from waveform.engine import checkpoint
from waveform.engine.checkpoint import Checkpoint
from waveform.engine.resume_notes import conditions, notes, settle_library
from waveform.engine.trainer import Trainer
from waveform.ranks.distributed import World
from waveform.system import linear
from waveform.system.linear import LIBRARIES

SMALL = {"num_layers": 1, "num_heads": 1, "num_position_features": 4, "window": 8, "memory": 8, "compressed": 4}
IN_KERNELS = {**SMALL, "d_model": 16, "d_feedforward": 16}
BY_TORCH = {**SMALL, "d_model": 12, "d_feedforward": 16}  # not whole vectors


@pytest.fixture(name="train")
def make_train(token_set: MakeTokens, tmp_path: Path) -> Callable[[dict[str, Any]], Trainer]:
    """train(fields): a Trainer after one update and its checkpoint."""

    def make(fields: dict[str, Any]) -> Trainer:
        trainer = small_trainer(
            "compressive_transformer", token_set([60]), tmp_path / "run", fields=fields, max_steps=1
        )
        trainer.run()
        return trainer

    return make


def notes_of(trainer: Trainer, run_dir: Path, **changes: Any) -> list[str]:
    """Notes on the checkpoint of `run_dir`; changes: what it says otherwise, None: what it does not say."""
    found = checkpoint.newest(run_dir)
    said = {name: value for name, value in {**found.conditions, **changes}.items() if value is not None}
    now = conditions(trainer.learner)
    return notes(Checkpoint(found.folder, found.progress, said), now)


@pytest.mark.parametrize("fields", [IN_KERNELS, BY_TORCH], ids=["kernels", "torch"])
def test_nothing_changed(fields: dict[str, Any], train: Callable[..., Trainer], tmp_path: Path) -> None:
    assert notes_of(train(fields), tmp_path / "run") == []


def test_layers_of_older_checkpoints_were_computed_by_torch(train: Callable[..., Trainer], tmp_path: Path) -> None:
    (note,) = notes_of(train(IN_KERNELS), tmp_path / "run", layers=None)
    assert note.startswith("saved with layers=torch, resumed with compiled: results will no longer be")


def test_older_checkpoints_of_other_models_and_devices_are_as_before(
    train: Callable[..., Trainer], tmp_path: Path
) -> None:
    assert notes_of(train(BY_TORCH), tmp_path / "run", layers=None, processor=None) == []
    (note,) = notes_of(train(BY_TORCH), tmp_path / "run", num_threads=3)
    assert note.startswith("saved with num_threads=3, resumed with 1:")
    (note,) = notes_of(train(BY_TORCH), tmp_path / "run", weather="fair")
    assert note.endswith("also has weather, which this version ignores")


@pytest.fixture(name="fastest")
def fix_library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The last item says which library is the fastest."""
    fastest = ["torch"]
    monkeypatch.setattr(linear, "fastest_library", lambda: fastest[-1])
    monkeypatch.setattr(linear, "taken", None)
    return fastest


@pytest.mark.parametrize("elsewhere", [False, True])
def test_takes_the_same_library_again_on_such_a_processor(
    elsewhere: bool, train: Callable[[dict[str, Any]], Trainer], tmp_path: Path, fastest: list[str]
) -> None:
    fastest.append("onednn")
    trainer = train(BY_TORCH)
    fastest.append("torch")
    linear.taken = None
    found = checkpoint.newest(tmp_path / "run")
    found.conditions["instructions"] = "NEON" if elsewhere else found.conditions["instructions"]
    settle_library(trainer.learner, found)
    said = notes(found, conditions(trainer.learner))
    assert len(said) == (2 if elsewhere else 0)


class _SecondRank(World):
    def largest(self, *values: int) -> list[int]:
        return [max(value, 1) for value in values]  # the first rank has found that the second library is faster


@pytest.mark.usefixtures("fastest")
def test_all_ranks_take_the_library_of_the_first(train: Callable[..., Trainer]) -> None:
    learner = train(BY_TORCH).learner
    learner.world = _SecondRank(rank=1, size=2)
    settle_library(learner, None)
    assert linear.taken == LIBRARIES[1]
