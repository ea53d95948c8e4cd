"""Checkpoints: complete or absent; damage is noticed and the previous one used; nothing read runs code."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.training import small_trainer
from tests.laws import CONFIGS
from waveform.engine import checkpoint
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import Trainer
from waveform.system.errors import UserError


@pytest.fixture
def trainer(token_set: Callable[..., TokenSet], tmp_path: Path) -> Trainer:
    """A run with checkpoints at the steps 4 and 6."""
    trainer = small_trainer("compressive_transformer", token_set([60, 45]), tmp_path, max_steps=6, checkpoint_every=2)
    trainer.run()
    return trainer


def test_only_the_newest_are_kept(trainer: Trainer, tmp_path: Path) -> None:
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000004", "step_00000006"]


FILES = ["model.safetensors", "optimiser.safetensors", "rank_0.safetensors", "progress.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damage_falls_back_to_the_checkpoint_before(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    path = tmp_path / "checkpoints" / "step_00000006" / name
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(
            content[:middle] + (b"" if damage == "cut" else bytes([content[middle] ^ 1]) + content[middle + 1 :])
        )
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 4
    assert str(path) in capsys.readouterr().err
    (tmp_path / "checkpoints" / "step_00000004" / name).write_bytes(b"")
    with pytest.raises(UserError, match="no usable checkpoint"):
        checkpoint.newest(tmp_path)


def test_folder_without_marker_does_not_count(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The marker precedes the folder's name, so a missing one was lost later."""
    (tmp_path / "checkpoints" / "step_00000006" / "complete.json").unlink()
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 4
    assert "step_00000006/complete.json: No such file or directory; using the checkpoint" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "step_00000004" / "complete.json").write_text("{}")
    with pytest.raises(UserError, match=r"no usable checkpoint in .*complete.json: No such file"):
        checkpoint.newest(tmp_path)


def test_one_that_training_removes_while_it_is_found_does_not_count(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(path: Path) -> object:
        shutil.rmtree(tmp_path / "checkpoints" / "step_00000006", ignore_errors=True)
        return read_json(path)

    read_json = checkpoint._read_json
    monkeypatch.setattr(checkpoint, "_read_json", read)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 4 and capsys.readouterr().err == ""


def test_leftover_of_a_killed_save_is_cleared(trainer: Trainer, tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".step_00000008.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    trainer.learner.step = 8
    trainer.save()
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 8 and not leftover.exists()


def test_failed_save_keeps_the_others(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    trainer.learner.step = 8
    with pytest.raises(UserError, match="disk is full"):
        trainer.save()
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 6


def test_state_of_another_version_is_not_resumed(token_set: Callable[..., TokenSet], tmp_path: Path) -> None:
    """Once it had more tensors: memories of each layer apart, and steps that waited for their group."""
    tokens, fields = token_set([60, 45]), CONFIGS["compressive_transformer"]["most-used"]
    trainer = small_trainer("compressive_transformer", tokens, tmp_path, fields=fields, max_steps=2, checkpoint_every=2)
    assert trainer.learner.state is not None
    trainer.learner.state = trainer.learner.state._replace(labels=(torch.zeros(4, dtype=torch.int64),))
    trainer.save()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with pytest.raises(UserError, match=r"holds 5 tensors of state and .* 4, .* train in another run folder$"):
        checkpoint.restore(
            found,
            model=trainer.learner.module,
            optimiser=trainer.learner.optimiser,
            fresh=trainer.learner.model.init_state(4, device="cpu", dtype=torch.float32),
            world=trainer.world,
        )


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code of a checkpoint ran')",))


@pytest.mark.parametrize("name", FILES)
def test_pickle_is_never_run(trainer: Trainer, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoints" / "step_00000006"
    (folder / name).write_bytes(pickle.dumps(_Bomb()))
    digests = {path.name: checkpoint._digest(path) for path in folder.iterdir() if path.name != "complete.json"}
    import json

    (folder / "complete.json").write_text(json.dumps(digests))
    with pytest.raises(UserError):
        found = checkpoint.newest(tmp_path)
        assert found is not None
        if found.step == 4:
            raise UserError("passed over")
        checkpoint.restore(
            found,
            model=trainer.learner.module,
            optimiser=trainer.learner.optimiser,
            fresh=trainer.learner.model.init_state(4, device="cpu", dtype=torch.float32),
            world=trainer.world,
        )
