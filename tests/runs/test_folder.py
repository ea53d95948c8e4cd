"""config.yaml, which anyone may have edited, is checked when it is read."""

from pathlib import Path

import pytest

from waveform.engine.checkpoint import Checkpoint, TrainingProgress
from waveform.runs.folder import check_recorded, comparable, read_config
from waveform.system.errors import UserError

CONFIG = """\
model: {name: wavenet, skip_channels: 8}
train: {chunk: 64, clip_norm: 0.1, aux_weight: 1, window: null, state: utterance, lr: 1e-3}
dataset: {vocab_size: 256, path: /data, modality: {kind: audio}, checksums: {train: abc}}
"""


def test_values_and_unknown_keys_are_kept(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG + "of_a_later_version: 3\n")
    config = read_config(tmp_path)
    assert config["model"] == {"name": "wavenet", "skip_channels": 8}
    assert config["train"]["lr"] == 1e-3 and config["of_a_later_version"] == 3


def test_a_run_that_began_before_a_field_existed_has_its_default() -> None:
    began = {"model": {"name": "transformer_xl", "memory": 9}, "train": {"lr": 1e-3}, "seed": 0}

    def of_today(**sections: dict[str, object]) -> dict[str, object]:
        return comparable({**began, **{name: {**began[name], **fields} for name, fields in sections.items()}})

    defaults = {"model": {"activation": "gelu", "clamp_len": 0}, "train": {"loss_share": 1.0, "lr_floor": 1e-6}}
    assert comparable(began) == of_today(**defaults)
    assert comparable({**began, "train": {"lr": 1e-3, "evaluate_batch_size": 4}}) == comparable(began)  # no longer one
    for model in ({"activation": "relu"}, {"memory": 8}):
        assert comparable(began) != of_today(model=model)
    for train in ({"loss_share": 0.5}, {"lr_floor": 0.0}):
        assert comparable(began) != of_today(train=train)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (CONFIG, "", "it is empty"),
        (CONFIG, "[1]", "Expected `object`, got `array`"),
        ("chunk: 64, ", "", "missing required field `chunk` - at `train`"),
        ("chunk: 64", "chunk: true", "Expected `int`, got `bool` - at `train.chunk`"),
        ("chunk: 64", "chunk: 0", "Expected `int` >= 1 - at `train.chunk`"),
        ("chunk: 64", "chunk: 2147483648", "Expected `int` <= 2147483647 - at `train.chunk`"),
        ("clip_norm: 0.1", "clip_norm: .nan", "at `train.clip_norm`"),
        ("clip_norm: 0.1", "clip_norm: .inf", "at `train.clip_norm`"),
        ("state: utterance", "state: often", "Invalid enum value 'often' - at `train.state`"),
        ("name: wavenet", "name: wavenet, window: wide", "Expected `int | null`, got `str` - at `model.window`"),
        ("path: /data", 'path: "/data\\0"', "at `dataset.path`"),
        ("checksums: {train: abc}", "checksums: 1", "at `dataset.checksums`"),
        ("vocab_size: 256", "vocab_size: 256, token_range: [3, 256]", "[3, 256] is not within 0 to 255"),
        ("vocab_size: 256", "vocab_size: 256, token_range: [9, 3]", "the token range [9, 3] is not within"),
        ("vocab_size: 256", "vocab_size: 256, token_range: [-1, 3]", "at `dataset.token_range"),
        ("kind: audio", "kind: " + 60 * "[" + 60 * "]", "it is nested too deeply"),
        ("chunk: 64", "chunk: &a 64, window_too: *a", "it has an alias"),
        ("lr: 1e-3", "lr: '${oc.env:HOME}'", "it has an interpolation"),
        ("lr: 1e-3", 'lr: "\\x24{oc.env:HOME}"', "it has an interpolation"),
    ],
)
def test_damage_is_one_line_that_names_the_field(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in CONFIG
    (tmp_path / "config.yaml").write_text(CONFIG.replace(old, new))
    with pytest.raises(UserError) as raised:
        read_config(tmp_path)
    text = str(raised.value)
    assert message in text and text.startswith(f"{tmp_path / 'config.yaml'} is damaged: ") and "\n" not in text


@pytest.mark.parametrize("recorded", [1, {"model": {"name": "lstm"}}, {"model": {"name": "lstm"}, "train": "often"}])
def test_a_record_of_anything_but_settings_is_one_line(recorded: object, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    progress = TrainingProgress(step=1, num_ranks=1, seconds=0, tokens_seen=0, cursor={}, run=recorded)
    with pytest.raises(UserError, match="everything; restore the file from a copy"):
        check_recorded(tmp_path, read_config(tmp_path), Checkpoint(tmp_path, progress, {}))
