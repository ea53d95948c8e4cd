"""Presets and studies of users and of other packages: sections by model, what they inherit, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from recipes.text import compose_config as compose_text
from tests.recipes.corpus_files import write_folder
from waveform.runs.settings import differing_keys
from waveform.speech.config import compose_config
from waveform.system.errors import UserError

DEMO = {"lr": 4e-3, "clip_norm": 1.0}  # what `demo` sets for WaveNet


def values(config: dict[str, Any], *names: str) -> list[Any]:
    return [config[section][field] for section, field in (name.split(".") for name in names)]


def test_a_model_counts_over_all_and_a_preset_over_what_it_inherits(tmp_path: Path) -> None:
    for_wavenet = "models: {wavenet: {train: {chunk: 128}, model: {kernel_size: 2}}}"
    mine = f"defaults: [demo]\ntrain: {{lr: 1, beta2: 0.9}}\n{for_wavenet}"
    write_folder(tmp_path, {"preset/mine.yaml": mine})
    config = compose_config(["preset=mine", "model=wavenet"], config_dir=tmp_path)
    assert config["preset"] == "mine" and "models" not in config
    assert values(config, "train.beta2", "train.chunk", "model.kernel_size", "train.max_seconds") == [0.9, 128, 2, 60]
    assert {name: config["train"][name] for name in DEMO} == DEMO  # which `demo` has for WaveNet alone
    assert compose_config(["preset=mine", "model=wavenet", "train.lr=2"], config_dir=tmp_path)["train"]["lr"] == 2
    assert compose_config(["preset=mine"], config_dir=tmp_path)["train"]["chunk"] == 64


def test_order_of_recipes_models_and_studies(tmp_path: Path) -> None:
    mine = """
        train: {lr: 1, beta2: 0.1, chunk: 16, batch_size: 1, log_every: 1, keep_checkpoints: 1}
        models:
          lstm: {train: {beta2: 0.2, chunk: 32, batch_size: 2, log_every: 2, keep_checkpoints: 2}}
          wavenet: {}
        recipes:
          ptb:
            train: {chunk: 48, batch_size: 3, log_every: 3, keep_checkpoints: 3}
            models: {lstm: {train: {batch_size: 4, log_every: 4, keep_checkpoints: 4}}}
    """
    own = "train: {log_every: 5, keep_checkpoints: 5}\nmodels: {lstm: {train: {keep_checkpoints: 6}}}"
    write_folder(tmp_path, {"preset/mine.yaml": mine, "study/own.yaml": own})
    names = [f"train.{name}" for name in ("lr", "beta2", "chunk", "batch_size", "log_every", "keep_checkpoints")]

    def found(recipe: str, model: str) -> list[Any]:
        return values(compose_text(recipe, ["preset=mine", "study=own", f"model={model}"], config_dir=tmp_path), *names)

    assert found("ptb", "lstm") == [1, 0.2, 48, 4, 5, 6]
    assert found("text8", "lstm") == [1, 0.2, 32, 2, 5, 6]
    assert found("ptb", "wavenet") == [1, 0.1, 48, 3, 5, 5]


def test_a_package_of_models_adds_to_presets(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    header = "# @package _global_\n"  # which such files had to have
    preset = {"more_configs/preset_model/demo_wavenet.yaml": f"{header}train: {{lr: 7}}\n"}
    points = {"more-1.0.dist-info/entry_points.txt": "[waveform.configs]\nmore = more_configs\n"}
    write_folder(tmp_path, preset | points | {"more_configs/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    assert compose_config(["preset=demo", "model=wavenet"])["train"]["lr"] == 7
    assert compose_config(["preset=hour", "model=wavenet"])["train"]["lr"] == 2.5e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lrr: 1}", "preset=mine sets the unknown 'train.lrr'; did you mean 'train.lr'"),
        ("models: {wavenet: {model: {width: 3}}}", "preset=mine sets the unknown 'model.width'"),
        ("train: {lr: fast}", "preset=mine: train.lr: give a number"),
        ("train: fast", "preset=mine: train is 'fast'; it needs settings by name"),
        ("models: [wavenet]", "'models' of a preset or study needs settings by name"),
        ("models: {wavnet: {}}", "preset=mine has settings for 'wavnet', which is not one of the models here"),
        ("recipes: {ptb: {}}", "preset=mine has settings for 'ptb', which is not one of the recipes here"),
        ("models: {lstm: {}}", "preset=mine has no sizes for model=wavenet; it has some for lstm"),
        ("defaults: [gone]", "preset=mine, model=wavenet: In 'preset/mine': Could not load 'preset/gone'"),
        ("defaults: [old]", "preset=mine: what it inherits is lost; remove '# @package _global_' from that"),
        ("{", "preset=mine, model=wavenet: while parsing"),
    ],
)
def test_presets_that_do_not_fit_are_refused(text: str, message: str, tmp_path: Path) -> None:
    old = "# @package _global_\nmodels: {wavenet: {train: {lr: 1}}}"
    write_folder(tmp_path, {"preset/mine.yaml": text, "preset/old.yaml": old})
    with pytest.raises(UserError, match="^" + message.replace("[", r"\[").replace("{", r"\{")):
        compose_config(["preset=mine", "model=wavenet"], config_dir=tmp_path)


def test_values_that_differ_are_shown_as_users_write_them() -> None:
    (line,) = differing_keys({"a": {"b": [None] * 21}}, {"a": {"b": True}})
    assert line == f"a.b (was [{', '.join(['null'] * 20)}] and 1 more, is true)"
    assert differing_keys({"name": "x", "c": 1}, {"name": "y"}) == ['name (was "x", is "y")']
