"""What a resumed run is told, by what its checkpoint says of the conditions that it was saved under."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.training import MakeTokens, small_trainer
from waveform.engine import checkpoint
from waveform.engine.checkpoint import Checkpoint
from waveform.engine.learner import Learner
from waveform.engine.resume_notes import conditions, notes, settle_library
from waveform.ranks.distributed import World
from waveform.system import linear_layers
from waveform.system.linear_layers import LIBRARIES

SMALL = {"num_layers": 1, "num_heads": 1, "num_position_features": 4, "window": 8, "memory": 8, "compressed": 4}
KERNELS = {**SMALL, "d_model": 16, "d_feedforward": 16}
BY_TORCH = {**SMALL, "d_model": 12, "d_feedforward": 16}  # not whole vectors
Train = Callable[[dict[str, Any]], tuple[Learner, Checkpoint]]


@pytest.fixture(name="train")
def make_train(token_set: MakeTokens, tmp_path: Path) -> Train:
    """train(fields): a learner after one update, and its checkpoint."""

    def make(fields: dict[str, Any]) -> tuple[Learner, Checkpoint]:
        trainer = small_trainer("compressive_transformer", token_set([60]), tmp_path, fields=fields, max_steps=1)
        trainer.run()
        return trainer.learner, checkpoint.newest(tmp_path)

    return make


@pytest.mark.parametrize(
    ("fields", "changes", "expected"),
    [
        (KERNELS, {}, []),
        (BY_TORCH, {}, []),
        (KERNELS, {"layers": None}, ["^saved with layers=torch, resumed with compiled: results will no longer be"]),
        (BY_TORCH, {"layers": None, "processor": None}, []),
        (BY_TORCH, {"num_threads": 3}, ["^saved with num_threads=3, resumed with 1:"]),
    ],
    ids=["kernels", "torch", "older, kernels", "older, torch", "other threads"],
)
def test_what_a_checkpoint_says_otherwise_is_noted(
    fields: dict[str, Any], changes: dict[str, Any], expected: list[str], train: Train
) -> None:
    """None: it is an older one, which does not say. Layers of older ones were computed by torch."""
    learner, found = train(fields)
    said = {name: value for name, value in {**found.conditions, **changes}.items() if value is not None}
    for note, words in zip(notes(replace(found, conditions=said), conditions(learner)), expected, strict=True):
        assert re.search(words, note)


@pytest.fixture(name="fastest")
def fix_library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The last item says which library is the fastest."""
    fastest = ["torch"]
    monkeypatch.setattr(linear_layers, "fastest_library", lambda: fastest[-1])
    monkeypatch.setattr(linear_layers, "taken", None)
    return fastest


@pytest.mark.parametrize("elsewhere", [False, True])
def test_takes_the_same_library_again_on_such_a_processor(elsewhere: bool, train: Train, fastest: list[str]) -> None:
    fastest.append("onednn")
    learner, found = train(BY_TORCH)
    fastest.append("torch")
    linear_layers.taken = None
    found.conditions["instructions"] = "NEON" if elsewhere else found.conditions["instructions"]
    settle_library(learner, found)
    assert len(notes(found, conditions(learner))) == (2 if elsewhere else 0)


@pytest.mark.usefixtures("fastest")
def test_all_ranks_take_the_library_of_the_first(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, the first has found that the second library is faster."""
    learner, _ = train(BY_TORCH)
    learner.world = World(rank=1, size=2)
    monkeypatch.setattr(World, "largest", lambda world, *values: [max(value, 1) for value in values])
    settle_library(learner, None)
    assert linear_layers.taken == LIBRARIES[1]
