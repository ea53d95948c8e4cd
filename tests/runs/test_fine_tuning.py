"""Going on from another run: `train --from`, for speech and for text."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load

from tests.calling import Capsys, cli, config_of, mistake
from tests.faults.small_runs import SETTINGS, write_audio
from tests.recipes.calling import run as recipes
from tests.runs.test_folder import CONFIG
from waveform.engine.metrics import read_metrics
from waveform.runs.fine_tuning import Origin, compose_from
from waveform.speech.config import compose_config
from waveform.system.errors import UserError

GoOn = Callable[..., None]
_SCHEDULE = ["train.checkpoint_every=100", "train.max_steps=3", "train.warmup_steps=0", "train.lr=2e-3"]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of another voice than that of `speech`."""
    place = tmp_path_factory.mktemp("other")
    write_audio(place / "voice", seconds=0.05)
    cli("prepare", place / "voice", place / "data")
    return place / "data"


def saved(run: Path, step: int, name: str) -> bytes:
    return (run / "checkpoints" / f"step_{step:08d}" / f"{name}.safetensors").read_bytes()


@pytest.fixture
def go_on(speech: Path, other: Path) -> GoOn:
    """Trains on data of another voice from the run on `speech`."""
    return lambda run, *more: cli("train", other, run, "--from", speech / "run", *_SCHEDULE, *more)


def test_an_archive_does_not_say_in_which_folder_a_run_began(go_on: GoOn, speech: Path, tmp_path: Path) -> None:
    go_on(tmp_path / "run")
    assert config_of(tmp_path / "run")["origin"]["run"] == str(speech / "run")
    cli("export", tmp_path / "run", tmp_path / "run.zip")
    with zipfile.ZipFile(tmp_path / "run.zip") as archive:
        config = archive.read("config.yaml").decode()
    assert str(speech) not in config and yaml.safe_load(config)["origin"]["run"] == "run"
    cli("sample", tmp_path / "run.zip", "--out", tmp_path / "s", "--seconds", "0.01")


@pytest.mark.parametrize(
    ("overrides", "model", "train"),
    [
        # The bundled run is older than a setting that is a list, and `preset=demo` is another model.
        (["preset=demo"], {"compression_dilations": [1, 2], "prediction": "linear", "d_model": 96}, {}),
        (["model.prediction_widening=0.9"], {"prediction_widening": 0.9}, {}),  # filters may be wider
        (
            ["+train={lr: 0.5, beta2: 0.9}", "model={window: 64}"],
            {"window": 64, "d_model": 96},
            {"lr": 0.5, "beta2": 0.9},
        ),
    ],
)
def test_settings_count_over_those_of_the_origin(
    overrides: list[str], model: dict[str, Any], train: dict[str, Any], tmp_path: Path
) -> None:
    config = compose_from(Origin("speech-en"), tmp_path / "new", overrides, compose=compose_config)
    assert model.items() <= config["model"].items() and train.items() <= config["train"].items()


@pytest.mark.parametrize("optimiser", [False, True])
def test_a_run_begins_with_the_weights_of_another(go_on: GoOn, speech: Path, tmp_path: Path, optimiser: bool) -> None:
    go_on(tmp_path / "run", *["--from-optimiser"] * optimiser)
    weights = saved(speech / "run", 4, "model")
    assert weights == saved(tmp_path / "run", 0, "model") != saved(tmp_path / "run", 3, "model")
    before, after = saved(speech / "run", 4, "optimiser"), saved(tmp_path / "run", 0, "optimiser")
    assert (before == after) == optimiser and bool(load(after)) == optimiser
    before, after = config_of(speech / "run"), config_of(tmp_path / "run")
    assert before["model"] == after["model"] and after["train"] == {
        **before["train"], "device": None, "max_steps": 3, "checkpoint_every": 100, "warmup_steps": 0, "lr": 2e-3
    }  # fmt: skip
    digests = json.loads((speech / "run" / "checkpoints" / "step_00000004" / "complete.json").read_text())
    began = {"run": str(speech / "run"), "step": 4, "weights": digests["model.safetensors"], "optimiser": optimiser}
    assert after["origin"] == began
    first = read_metrics(tmp_path / "run")[0]
    assert first["kind"] == "train" and first["step"] == 1 and first["lr"] == 2e-3


def test_a_preset_is_of_training_only_and_a_longer_memory_fits(go_on: GoOn, speech: Path, tmp_path: Path) -> None:
    changed = {"memory": 32, "compressed": 16, "initial_values": "sonnet"}
    settings = [f"model.{name}={value}" for name, value in changed.items()]
    go_on(tmp_path / "run", "preset=demo", "train.chunk=32", "train.evaluate_tokens=200", *settings)
    before, after = config_of(speech / "run"), config_of(tmp_path / "run")
    assert after["preset"] == "demo" and after["model"] == before["model"] | changed
    assert after["train"]["batch_size"] != before["train"]["batch_size"]


def test_resuming_does_not_need_the_other(other: Path, speech: Path, tmp_path: Path, capsys: Capsys) -> None:
    shutil.copytree(speech / "run", tmp_path / "origin")
    command = ["train", other, tmp_path / "run", *_SCHEDULE]
    named = ["--from", tmp_path / "origin"]
    cli(*command, *named)
    shutil.rmtree(tmp_path / "origin")
    cli(*command, "train.max_steps=4")
    cli(*command, *named, "train.max_steps=5")
    assert "resumed at step 4" in capsys.readouterr().err
    assert load(saved(tmp_path / "run", 5, "model"))


def test_a_run_killed_before_its_first_checkpoint_begins_again(other: Path, speech: Path, tmp_path: Path) -> None:
    shutil.copytree(speech / "run", tmp_path / "origin")
    command = ["train", other, tmp_path / "run", "--from", tmp_path / "origin", *_SCHEDULE]
    cli(*command)
    wanted = saved(tmp_path / "run", 3, "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    cli(*command)
    assert saved(tmp_path / "run", 3, "model") == wanted
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    cli("train", speech / "data", tmp_path / "origin", *SETTINGS, "train.max_steps=5")
    assert "has been trained since, to step 5" in mistake(command)


def test_what_does_not_fit_is_refused(go_on: GoOn, other: Path, speech: Path, tmp_path: Path) -> None:
    run, data, named = tmp_path / "run", other, ["--from", speech / "run"]
    line = mistake(["train", data, run, *named, "model.d_model=16", "model.norm=post"])
    assert 'model.d_model (was 8, is 16); model.norm (was "pre", is "post")' in line
    line = mistake(["train", data, run, *named, "model=wavenet"])
    assert 'do not fit this model: model.name (was "compressive_transformer", is "wavenet"); leave' in line
    assert "give way to those that --from takes over" in mistake(["train", data, run, *named, "study=none"])
    assert "--from names; give both" in mistake(["train", data, run, "--from-optimiser"])
    assert "no such run folder" in mistake(["train", data, run, "--from", tmp_path / "nosuch"])
    assert not run.exists()
    go_on(run)
    assert "optimiser (was false, is true)" in mistake(["train", data, run, *named, "--from-optimiser", *_SCHEDULE])
    line = mistake(["train", data, run, "--from", tmp_path, *_SCHEDULE])
    assert f'run (was "{speech / "run"}", is "{tmp_path}")' in line
    assert "did not begin from another one" in mistake(["train", speech / "data", speech / "run", *named])


def test_print_config_shows_what_is_taken_over(go_on: GoOn, tmp_path: Path, capsys: Capsys) -> None:
    go_on(tmp_path / "run", "--print-config")
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"]["d_model"] == 8 and shown["origin"]["step"] == 4 and not (tmp_path / "run").exists()


def test_text_goes_on_with_its_vocabulary(text: Path, tmp_path: Path) -> None:
    def command(data: Path) -> list[Any]:
        return ["train", data, tmp_path / f"run-{data.name}", "--from", text / "run", "train.max_steps=2"]

    cli(*command(text / "data"))
    assert saved(text / "run", 4, "model") == saved(tmp_path / "run-data", 0, "model")
    for name, settings in {"bytes": ["tokens=bytes"], "words": ["tokens=subwords", "vocab_size=270"]}.items():
        recipes("prepare", "folder", text / "texts", tmp_path / name, *(f"corpus.{s}" for s in settings))
        assert "has a different vocabulary" in mistake(command(tmp_path / name))
        line = mistake(["evaluate", text / "run", "--data", tmp_path / name])
        assert "has a different vocabulary" in line and "--from" not in line


def test_a_run_names_no_file_of_settings(tmp_path: Path) -> None:
    origin = "origin: {run: other, step: 1, weights: abc, optimiser: false}\n"
    (tmp_path / "config.yaml").write_text(CONFIG.replace("name: wavenet", "name: ../../elsewhere") + origin)
    with pytest.raises(UserError, match=r"unknown model '../../elsewhere'"):
        compose_from(Origin(), tmp_path, (), compose=lambda overrides: pytest.fail("they were composed"))


def test_audio_does_not_go_on_from_text_nor_text_from_audio(
    other: Path, speech: Path, text: Path, tmp_path: Path
) -> None:
    write_audio(tmp_path / "voices" / "ann", seconds=0.05)
    labels = ["data.labels=folder", "data.split.test=0.27"]  # enough for a file in each split
    cli("prepare", tmp_path / "voices", tmp_path / "labelled", *labels)
    for data in (other, tmp_path / "labelled"):
        line = mistake(["train", data, tmp_path / "run", "--from", text / "run"])
        assert "was trained on different tokens" in line and 'kind (was "text", is "audio")' in line
        assert "labels" not in line
    line = mistake(["train", text / "data", tmp_path / "t", "--from", speech / "run"])
    assert "is a run of the kind audio, not on text; name one on text, or begin without --from" in line
    assert not (tmp_path / "t").exists()
