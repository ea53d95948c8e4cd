"""Trainings in turn: the same results as one after the other, all of the budgets, all saved."""

import itertools
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from tests import laws
from tests.calling import before, interrupt_training
from tests.engine.conftest import write_tokens
from tests.engine.training import small_learner, small_trainer
from waveform.engine import checkpoint, learner, turns
from waveform.engine.learner import Learner
from waveform.engine.metrics import read_metrics
from waveform.engine.nonfinite import Diverged
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import Trainer
from waveform.engine.turns import train_in_turn
from waveform.ranks.distributed import World

LENGTHS = [60, 45, 33, 80, 21, 52, 70]
A_SECOND = {"max_steps": None, "max_seconds": 1.0}
DROPOUT = {"compressive_transformer": {"dropout": 0.1}, "transformer_xl": {"dropout": 0.2}, "wavenet": {}}
MODELS = tuple(DROPOUT)
STEP_S = 1 / 16  # exact in binary
Saved = dict[str, dict[str, bytes]]  # by model and file


def open_trainers(folder: Path, tokens: TokenSet, **train: Any) -> dict[str, Trainer]:
    """A trainer of each model; those of attention draw random numbers, for dropout."""
    fields = {name: laws.first_fields(name) | dropout for name, dropout in DROPOUT.items()}
    return {name: small_trainer(name, tokens, folder / name, fields=fields[name], **train) for name in MODELS}


def saved(folder: Path, name: str) -> dict[str, bytes]:
    """The tensors of a model's newest checkpoint: weights, optimiser, state and random numbers."""
    return {path.name: path.read_bytes() for path in checkpoint.newest(folder / name).folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What each model saves that was trained without the others."""
    folder = tmp_path_factory.mktemp("alone")
    tokens = write_tokens(folder / "tokens.shard", LENGTHS)
    for name in MODELS:
        open_trainers(folder, tokens)[name].run()
    return {name: saved(folder, name) for name in MODELS}


@pytest.fixture
def order(monkeypatch: MonkeyPatch) -> list[str]:
    """Gives every update the same duration; returns a list that gets the model of each."""
    clock = itertools.count()
    monkeypatch.setattr(learner.time, "perf_counter", lambda: next(clock) * STEP_S)
    made: list[str] = []
    before(monkeypatch, Learner, "update", lambda self: made.append(type(self.model).__name__))
    return made


def test_slices_give_bit_for_bit_what_one_after_the_other_gives(alone: Saved, tokens: TokenSet, tmp_path: Path) -> None:
    results = train_in_turn(open_trainers(tmp_path, tokens), slice_s=0.0)
    assert [result.step for result in results] == [8, 8, 8]
    assert not any(result.stopped_by for result in results)
    assert {name: saved(tmp_path, name) for name in MODELS} == alone


def test_each_uses_its_budget_in_turn(tokens: TokenSet, tmp_path: Path, order: list[str]) -> None:
    results = train_in_turn(open_trainers(tmp_path, tokens, **A_SECOND), slice_s=4 * STEP_S)
    assert [result.seconds for result in results] == [1.0, 1.0, 1.0]
    slices = [(name, len(list(updates))) for name, updates in itertools.groupby(order)]
    assert {length for _, length in slices} == {4} and len(slices) == 12
    rounds = [{name for name, _ in slices[i : i + 3]} for i in range(0, 12, 3)]
    assert all(len(names) == 3 for names in rounds)


def test_one_that_is_behind_catches_up_first(tokens: TokenSet, tmp_path: Path, order: list[str]) -> None:
    trainers = open_trainers(tmp_path, tokens, **A_SECOND)
    for name in MODELS[:2]:
        for _ in range(8):
            trainers[name].learner.update()
    order.clear()
    train_in_turn(trainers, slice_s=4 * STEP_S)
    assert len(set(order[:8])) == 1 and len(set(order[-12:])) == 3


def test_waiting_for_a_core_need_not_count(
    tokens: TokenSet, tmp_path: Path, order: list[str], monkeypatch: MonkeyPatch
) -> None:
    """Each update waits for half of its time: without that, twice as many fit into the budget."""
    waited = itertools.count()
    monkeypatch.setattr(learner, "waited_s", lambda: next(waited) * STEP_S / 2)
    limits = {"max_steps": None, "max_seconds": 0.5}
    for counts, num_updates in ((True, 8), (False, 16)):
        order.clear()
        small_trainer("wavenet", tokens, tmp_path / str(counts), count_waiting=counts, **limits).run()
        assert len(order) == num_updates


@pytest.mark.usefixtures("order")
def test_waiting_of_another_process_need_not_count(tokens: TokenSet, monkeypatch: MonkeyPatch) -> None:
    """It waits for half of each update, and this one waits for it."""
    both = [
        (small_learner("wavenet", tokens, count_waiting=counts), share) for counts, share in ((True, 1), (False, 0.5))
    ]
    monkeypatch.setattr(learner, "waited_s", lambda: 0.0)
    monkeypatch.setattr(World, "largest", lambda _, own: [max(own, int(STEP_S / 2 * 1e6))])
    for one, share in both:
        one.update()
        assert one.seconds == share * STEP_S


def test_waiting_never_takes_back_time(tokens: TokenSet, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """On a machine so busy that a training waits wherever it looks at the clock."""
    clock, looked_at_s = itertools.count(), [0.0]

    def wait() -> float:
        looked_at_s.append(next(clock) * STEP_S)
        return looked_at_s[-1]

    monkeypatch.setattr(learner.time, "perf_counter", wait)
    monkeypatch.setattr(learner, "waited_s", lambda: looked_at_s[-1])
    one = small_trainer("wavenet", tokens, tmp_path / "run", count_waiting=False)
    for _ in range(4):
        before_s = one.learner.seconds
        one.learner.update()
        assert one.learner.seconds >= before_s


@pytest.mark.usefixtures("order")
def test_one_signal_saves_all_and_the_same_call_continues(
    alone: Saved, tokens: TokenSet, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    made = interrupt_training(monkeypatch, at=10)
    first = train_in_turn(open_trainers(tmp_path, tokens), slice_s=0.0)
    assert [result.stopped_by for result in first] == [signal.SIGINT] * 3 and len(made) == 10
    again = open_trainers(tmp_path, tokens)
    assert [one.learner.step for one in again.values()] == [result.step for result in first]
    assert sum(one.learner.step for one in again.values()) == 10
    train_in_turn(again, slice_s=0.0)
    assert {name: saved(tmp_path, name) for name in MODELS} == alone


@pytest.mark.usefixtures("order")
def test_a_kill_costs_no_more_than_what_was_trained_since_the_last_save(
    tokens: TokenSet, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SAVE_EVERY_S", 6 * STEP_S)
    steps: list[int] = []
    before(monkeypatch, Trainer, "save", lambda self: steps.append(self.learner.step))
    train_in_turn(open_trainers(tmp_path, tokens, **A_SECOND), slice_s=2 * STEP_S)
    assert sorted(steps) == [6] * 3 + [12] * 3 + [16] * 3


@pytest.mark.usefixtures("order")
def test_if_one_diverges_the_others_continue_from_their_last_save(
    alone: Saved, tokens: TokenSet, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Bit for bit: the error reaches the caller, and leaves what the others have saved as it was."""
    monkeypatch.setattr(turns, "SAVE_EVERY_S", STEP_S)
    trainers = open_trainers(tmp_path, tokens)
    diverging = trainers["transformer_xl"].learner

    def poison() -> None:
        if diverging.step == 3:
            next(iter(diverging.module.parameters())).data.fill_(math.nan)

    before(monkeypatch, diverging, "update", poison)
    with pytest.raises(Diverged, match="not finite at step 3"):
        train_in_turn(trainers, slice_s=0.0)
    name = "compressive_transformer"
    assert checkpoint.newest(tmp_path / name).step in (3, 4)
    open_trainers(tmp_path, tokens)[name].run()
    assert saved(tmp_path, name) == alone[name]


@pytest.mark.usefixtures("order")
def test_validation_by_the_clock(tokens: TokenSet, tmp_path: Path) -> None:
    limits = {**A_SECOND, "evaluate_every_seconds": 4 * STEP_S, "evaluate_tokens": None}
    train_in_turn(open_trainers(tmp_path, tokens, **limits), slice_s=2 * STEP_S)
    for name in MODELS:
        seconds = [record["seconds"] for record in read_metrics(tmp_path / name) if record["kind"] == "evaluate"]
        assert seconds == [0.25, 0.5, 0.75, 1.0]
