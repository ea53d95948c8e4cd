"""Search spaces: what a file may say, what it comes to, and those that the models come with."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from waveform.runs.configured_model import model_from
from waveform.runs.space import Range, Space, space_of
from waveform.speech.config import SPEECH, compose_config
from waveform.system.errors import UserError

TEXT = """\
train.lr: {low: 1e-3, high: 2e-2, log: true}
model.num_layers: {low: 2, high: 6}
train.precision: [auto, fp32]
size:
  small: {model.d_model: 64, train.window: null}
  wide: {model.d_model: 96, train.window: 32}
"""


def written(text: str, tmp_path: Path) -> Space:
    (tmp_path / "space.yaml").write_text(text)
    return space_of("any", packages=[], file=tmp_path / "space.yaml")


def test_what_is_drawn_becomes_settings(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    space = written(TEXT, tmp_path)
    drawn = {"train.lr": 0.0044721, "model.num_layers": 4, "train.precision": "fp32", "size": "wide"}
    trial = optuna.trial.FixedTrial(drawn)
    assert space.draw(trial) == drawn
    assert trial.distributions == {
        "train.lr": optuna.distributions.FloatDistribution(1e-3, 2e-2, log=True),
        "model.num_layers": optuna.distributions.IntDistribution(2, 6),
        "train.precision": optuna.distributions.CategoricalDistribution(["auto", "fp32"]),
        "size": optuna.distributions.CategoricalDistribution(["small", "wide"]),
    }
    wide = ["model.d_model=96", "train.window=32"]
    assert space.overrides(drawn) == ["train.lr=0.00447", "model.num_layers=4", "train.precision=fp32", *wide]
    assert space.overrides({"size": "small"}) == ["model.d_model=64", "train.window=null"]


def test_a_configuration_is_found_in_the_space(tmp_path: Path) -> None:
    config = {"train": {"lr": 0.5, "precision": "auto", "window": 32}, "model": {"num_layers": 2, "d_model": 96}}
    drawn = {"model.num_layers": 2, "train.precision": "auto", "size": "wide"}
    assert written(TEXT, tmp_path).drawn_by(config) == drawn
    config["train"] |= {"window": None, "lr": None}
    del drawn["size"]
    assert written(TEXT, tmp_path).drawn_by(config) == drawn


def test_a_setting_given_takes_its_group_with_it(tmp_path: Path) -> None:
    free = written(TEXT, tmp_path).without({"train.window", "train.lr"})
    assert list(free.dimensions) == ["model.num_layers", "train.precision"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.lr: 3", "Expected"),
        ("[1, 2]", "Expected `object`"),
        ("train.lr: {low: 1, high: 1}", "low must be below high"),
        ("train.lr: {low: 0, high: 1, log: true}", "above 0 if log"),
        ("train.lr: {low: 1, high: .inf}", "both finite"),
        ("train.lr: {low: -.inf, high: 1}", "both finite"),
        ("seed: [0, 1]", "seed cannot be searched"),
        ("train.lr: {low: 1}", "missing required field `high`"),
        ("train.lr: {low: 1, high: 2, step: 3}", "unknown field `step`"),
        ("train.lr: []", "length >= 1"),
        ("size: {small: [train.lr=3]}", "Expected `object`"),
        ("size: {}", "length >= 1"),
        ("train.lr: [1]\nsize: {small: {train.lr: 3}}", "both train.lr and size give values to train.lr"),
        ("train.lr: {", "is not a search space"),
    ],
)
def test_what_is_not_a_space(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"space\.yaml is not a search space") as error:
        written(text, tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("model", ["compressive_transformer", "transformer_xl", "wavenet"])
def test_the_spaces_that_models_come_with(model: str) -> None:
    """They contain the demo's settings. Every size is one that the model accepts, and transformers' have kernels."""
    space = space_of(model, packages=SPEECH.packages)
    demo = compose_config([f"model={model}", "preset=demo"])
    assert space.drawn_by(demo).keys() == space.dimensions.keys()
    named = [choices for name, choices in space.dimensions.items() if len(space.settings_of(name)) > 1]
    for combination in product(*(choices.values() for choices in named if not isinstance(choices, Range))):
        settings = {key: value for choice in combination for key, value in choice.items()}
        assert settings.get("train.chunk", 1) % settings.get("model.window", 1) == 0
        sizes = {key[6:]: value for key, value in settings.items() if key.startswith("model.")}
        dataset = {"vocab_size": 256, "modality": {"kind": "audio"}}
        with torch.device("meta"):
            built: Any = model_from({**demo, "model": {**demo["model"], **sizes}, "dataset": dataset})
        assert model == "wavenet" or built.has_kernels, settings


def test_the_example_in_the_docs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    space = written(text, tmp_path)
    assert space.dimensions["train.lr"] == Range(low=1e-4, high=1e-2, log=True)
    for drawn in space.each_alone():
        compose_config(["preset=demo", *space.overrides(drawn)])


def test_a_file_may_have_a_section_for_each_model(tmp_path: Path) -> None:
    (tmp_path / "spaces.yaml").write_text("wavenet: {train.lr: [1, 2]}\nlstm: {train.lr: [3]}\n")
    assert space_of("wavenet", packages=[], file=tmp_path / "spaces.yaml").dimensions == {
        "train.lr": {"1": {"train.lr": 1}, "2": {"train.lr": 2}}
    }
    with pytest.raises(UserError, match=r"spaces\.yaml has no search space for model 'transformer_xl'"):
        space_of("transformer_xl", packages=[], file=tmp_path / "spaces.yaml")
    with pytest.raises(UserError, match=r"'gru' comes without a search space; .* --space FILE\.yaml"):
        space_of("gru", packages=SPEECH.packages)
