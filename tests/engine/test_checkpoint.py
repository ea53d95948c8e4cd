"""Checkpoints: complete or absent; damage is noticed and the previous one used; nothing read runs code."""

import json
import pickle
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pytest import MonkeyPatch

from tests.calling import Capsys, before
from tests.engine.conftest import write_tokens
from tests.engine.training import MakeTokens, small_trainer
from tests.laws import CONFIGS
from waveform.engine import checkpoint
from waveform.engine.trainer import Trainer
from waveform.system.errors import UserError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    tokens = write_tokens(folder / "tokens", [60, 45])
    small_trainer("compressive_transformer", tokens, folder / "run", max_steps=6, checkpoint_every=2).run()
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def resumed(run: Path, **train: Any) -> Trainer:
    return small_trainer("compressive_transformer", write_tokens(run / "tokens", [60, 45]), run, max_steps=6, **train)


FILES = ["model.safetensors", "optimiser.safetensors", "rank_0.safetensors", "progress.json", "complete.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damage_falls_back_to_the_checkpoint_before(run: Path, capsys: Capsys, name: str, damage: str) -> None:
    path = run / "checkpoints" / "step_00000006" / name
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    path.write_bytes(content[:middle] if damage == "cut" else content)
    if damage == "remove":
        path.unlink()
    assert checkpoint.newest(run).step == 4
    said = capsys.readouterr().err
    assert str(path) in said and "; using the checkpoint of step 4 instead" in said
    (run / "checkpoints" / "step_00000004" / name).write_bytes(b"")
    with pytest.raises(UserError, match="no usable checkpoint"):
        checkpoint.newest(run)


def test_a_renamed_one_does_not_count(run: Path, capsys: Capsys) -> None:
    (run / "checkpoints" / "step_00000006").rename(run / "checkpoints" / "step_00000009")
    assert checkpoint.newest(run).step == 4
    assert "it is of step 6" in capsys.readouterr().err


def test_one_that_training_removes_while_it_is_found_does_not_count(
    run: Path, monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    newest = run / "checkpoints" / "step_00000006"
    before(monkeypatch, checkpoint, "_read_json", lambda path: shutil.rmtree(newest, ignore_errors=True))
    assert checkpoint.newest(run).step == 4 and capsys.readouterr().err == ""


def test_training_replaces_damaged_ones(run: Path) -> None:
    """Of the step that it saves, and of later ones."""
    damaged = run / "checkpoints" / "step_00000006"
    (damaged / "model.safetensors").write_bytes(b"")
    shutil.copytree(damaged, damaged.with_name("step_00000008"))
    resumed(run).run()
    assert checkpoint.newest(run).step == 6
    assert sorted(path.name for path in damaged.parent.iterdir()) == ["step_00000004", "step_00000006"]


def test_leftover_of_a_killed_save_is_cleared(run: Path) -> None:
    leftover = run / "checkpoints" / ".step_00000008.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    trainer = resumed(run, keep_checkpoints=1)
    assert [path.name for path in leftover.parent.iterdir()] == ["step_00000006"]
    trainer.learner.step = 8
    trainer.save()
    assert checkpoint.newest(run).step == 8


def test_failed_save_keeps_the_others(run: Path, monkeypatch: MonkeyPatch) -> None:
    trainer = resumed(run)
    monkeypatch.setattr(checkpoint, "save_file", Mock(side_effect=OSError(28, "No space left on device")))
    trainer.learner.step = 8
    with pytest.raises(UserError, match="disk is full"):
        trainer.save()
    assert checkpoint.newest(run).step == 6


def test_state_of_another_version_is_not_resumed(token_set: MakeTokens, tmp_path: Path) -> None:
    """Once it had more tensors: memories of each layer apart, and steps that waited for their group."""
    tokens, fields = token_set([60, 45]), CONFIGS["compressive_transformer"]["most-used"]
    trainer = small_trainer("compressive_transformer", tokens, tmp_path, fields=fields)
    trainer.learner.state = trainer.learner.state._replace(labels=(torch.zeros(4, dtype=torch.int64),))
    trainer.save()
    with pytest.raises(UserError, match=r"holds 5 tensors of state and .* 4, .* train in another run folder$"):
        small_trainer("compressive_transformer", tokens, tmp_path, fields=fields)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code of a checkpoint ran')",))


@pytest.mark.parametrize("name", FILES[:-1])
def test_pickle_is_never_run(run: Path, name: str) -> None:
    folder = run / "checkpoints" / "step_00000006"
    (folder / name).write_bytes(pickle.dumps(_Bomb()))
    digests = {path.name: checkpoint._digest(path) for path in folder.iterdir() if path.name != "complete.json"}
    (folder / "complete.json").write_text(json.dumps(digests))
    with nullcontext() if name == "progress.json" else pytest.raises(UserError):
        assert resumed(run).learner.step == 4  # this file is read when a checkpoint is looked for, which passes it over
