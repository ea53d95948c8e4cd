"""`waveform tune`: finds the better settings, continues after an interruption, prunes, and says what is wrong."""

import gc
import json
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf
from pytest import MonkeyPatch

from tests.calling import SMALL, Capsys, cli, figures_of, interrupt_training, mistake, prepared_tones
from tests.faults import forkserver
from tests.recipes.corpus_files import write_folder
from tests.test_cli import words
from waveform.cli import main
from waveform.engine import checkpoint
from waveform.runs import settings
from waveform.runs.folder import read_config
from waveform.speech.config import compose_config
from waveform.system.signals import Interrupted

search = pytest.importorskip("waveform.tuning.search", reason="the extra `tune` is not installed")

GOOD, BAD = 8e-3, 1e-9  # learning rates; the first is the preset's, and so the first trial's
SETTINGS = ["model=transformer_xl", "preset=mine", *(f"model.{field}" for field in SMALL["transformer_xl"].split())]
SETTINGS += ["train.batch_size=2", "train.chunk=64", "train.log_every=2", "train.device=cpu"]
SETTINGS += ["seed=3", "model.prediction=none"]


def space(place: Path, text: str) -> list[str]:
    file = place / f"space {abs(hash(text))}.yaml"
    file.write_text(text)
    return ["--space", str(file)]


def tune(place: Path, out_dir: Path, *more: str, trials: int = 2, budget: str = "1s") -> list[str]:
    """The command for the first choices of learning rates that a seed draws."""
    command = ["tune", str(place / "data"), str(out_dir), "--budget", budget, "--trials", str(trials)]
    rates = space(place, f"train.lr: [{GOOD}, {BAD}]")
    files = ["--config-dir", str(place / "configs"), "--json", f"{out_dir}.json"]
    return [*command, *rates, *files, *SETTINGS, *more]


def trials_of(out_dir: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(Path(f"{out_dir}.json").read_text())
    return entries


@pytest.fixture(scope="module", autouse=True)
def compose_once() -> Iterator[None]:
    """A user's own presets are read anew each time, for they may change; those of these tests do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings._by_hydra, "__wrapped__", settings._by_hydra)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a search of two trials that has ended, in a folder with odd characters in its name."""
    place = tmp_path_factory.mktemp("odd? [name], a=b%20#")
    prepared_tones(place, train=1, valid=1, test=1)
    sizes = f"{{transformer_xl: {{model: {{d_model: 64, num_heads: 4}}, train: {{lr: {GOOD}}}}}}}"
    preset = f"defaults: [demo, _self_]\ntrain: {{warmup_steps: 1}}\nmodels: {sizes}\n"
    write_folder(place, {"configs/preset/mine.yaml": preset})
    cli(*tune(place, place / "done"))
    return place


@pytest.mark.slow
def test_the_better_learning_rate_wins(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    best, other = trials_of(place / "done")
    assert [best["drawn"]["train.lr"], other["drawn"]["train.lr"]] == [str(GOOD), str(BAD)]
    assert best["nats_per_token"] < other["nats_per_token"] - 0.5
    assert {best["state"], other["state"]} == {"complete"} and best["train_tokens_seen"] > 64
    assert list(best["nll_nats_by_share_of_budget"]) == ["0.2", "0.4", "0.6", "0.8"]
    assert 1 <= best["train_seconds"] < 2
    evaluated = figures_of(tmp_path / "e.json", "evaluate", best["run"], "--split", "valid")
    assert evaluated["nats_per_token"] == best["nats_per_token"]

    capsys.readouterr()
    cli(*tune(place, place / "done"))  # it has ended, and only says so
    out = capsys.readouterr().out
    assert len(re.findall(r"^[01]  .* complete .* lr (?:0\.008|1e-09)$", out, re.MULTILINE)) == 2
    (command,) = re.findall(r"^    waveform (train .*)$", out, re.MULTILINE)
    cli(*shlex.split(command), "--print-config")
    trained = read_config(Path(best["run"]))
    again = compose_config(best["settings"], config_dir=place / "configs")
    assert OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out)) == {**again, "preset": "best"}
    assert again["model"] == trained["model"] and again["train"]["lr"] == GOOD
    assert again["train"]["max_seconds"] == 1 and again["train"]["max_steps"] is None


@pytest.mark.slow
def test_more_trials_are_added_and_hopeless_ones_pruned(
    place: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setattr(search, "_UNPRUNED", (1, 1))
    monkeypatch.setattr("waveform.verbs.tune._NUM_ROWS", 3)
    shutil.copytree(place / "done", tmp_path / "more")
    cli(*tune(place, tmp_path / "more", trials=4))
    entries = trials_of(tmp_path / "more")
    assert sorted(entry["trial"] for entry in entries) == [0, 1, 2, 3]
    pruned = [entry for entry in entries if entry["trial"] > 1 and entry["drawn"]["train.lr"] == str(BAD)]
    assert pruned and entries[-1] in pruned
    for entry in pruned:
        assert entry["state"] == "pruned" and entry["train_seconds"] < 0.9 and entry["num_parameters"] > 1000
        assert list(entry["nll_nats_by_share_of_budget"]) == ["0.2", "0.4"]
        said = capsys.readouterr().out
        assert f"trial {entry['trial']} is pruned" in said and "\nand 1 other trial\n" in said


@pytest.mark.slow
def test_an_interrupted_search_goes_on(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    """Once while a trial trains and once while it is judged: it is neither lost, nor trained or counted twice."""
    out_dir = tmp_path / "search"
    command = tune(place, out_dir, budget="0.4s")
    with monkeypatch.context() as patched:
        interrupt_training(patched, at=5)
        assert main(command) == 130
    assert capsys.readouterr().err.endswith("stopped by SIGINT; the same command continues\n")
    saved = checkpoint.newest(out_dir / "trial-000")
    assert saved is not None and 0 < saved.progress.seconds < 0.4

    with monkeypatch.context() as patched:
        patched.setattr(search, "score", Mock(side_effect=Interrupted(signal.SIGTERM)))
        assert main(command) == 143
    err = capsys.readouterr().err
    assert f"resumed at step {saved.step}" in err and "the same command continues" in err
    trained = checkpoint.newest(out_dir / "trial-000")
    assert trained is not None and trained.step > saved.step and 0.4 <= trained.progress.seconds < 1.4

    cli(*command)
    entries = trials_of(out_dir)
    assert [entry["drawn"] for entry in entries] == [entry["drawn"] for entry in trials_of(place / "done")]
    assert [entry["trial"] for entry in entries] == [0, 1]
    assert entries[0]["train_seconds"] == trained.progress.seconds
    after = checkpoint.newest(out_dir / "trial-000")
    assert after is not None and after.step == trained.step
    assert {path.name for path in out_dir.glob("trial-*")} == {"trial-000", "trial-001"}


@pytest.mark.slow
def test_a_killed_search_goes_on(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    out_dir = tmp_path / "search"
    command = tune(place, out_dir, "train.checkpoint_every=10")
    process = forkserver.start(main, command, output=tmp_path / "said", daemon=False)
    while not list((out_dir / "trial-001").glob("checkpoints/step_*/complete.json")):
        time.sleep(0.01)
        assert process.is_alive(), (tmp_path / "said").read_text()
    process.kill()
    process.join()
    killed = checkpoint.newest(out_dir / "trial-001")
    assert killed is not None and killed.progress.seconds < 1
    log = (out_dir / "trial-000" / "metrics.jsonl").read_bytes()
    cli(*command)
    assert sorted(entry["trial"] for entry in trials_of(out_dir)) == [0, 1]
    assert (out_dir / "trial-000" / "metrics.jsonl").read_bytes() == log
    assert f"resumed at step {killed.step}\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trial_that_fails_is_named_and_the_search_goes_on(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    """By a loss that is not finite, and by sizes that a model refuses together, but each with the preset's."""
    text = f"train.lr: [{GOOD}, 9e18]\nmodel.d_model: [64, 72]\nmodel.num_heads: [4, 16]"
    command = tune(place, tmp_path / "s", *space(place, text), trials=6, budget="0.3s")
    cli(*(word for word in command if not word.startswith(("model.d_model", "model.num_heads"))))
    entries = trials_of(tmp_path / "s")
    first = next(entry for entry in entries if entry["trial"] == 0)
    assert first["drawn"] == {"train.lr": str(GOOD), "model.d_model": "64", "model.num_heads": "4"}  # the preset's
    assert first["state"] == "complete"
    reasons = {entry["trial"]: entry["reason"] for entry in entries if entry["state"] == "failed"}
    assert any("is not finite" in reason for reason in reasons.values())
    assert any("model.d_model" in reason for reason in reasons.values())
    out = capsys.readouterr().out
    assert all(f"trial {number} failed: {reason}" in out for number, reason in reasons.items())


# What comes after the folder of data, in words as of tests/test_cli; the space, if it is another; and the message
MISTAKES: list[tuple[str, str | None, str]] = [
    ("T/s --budget 10", None, "--budget '10' is not a time"),
    ("T/s --budget 0s", None, "leaves no time"),
    ("T/s --trials 0", None, "--trials is 0"),
    ("T/s model=gpt", None, "unknown model 'gpt'; choose one of"),
    ("T/s train.lrr=1", None, "did you mean 'train.lr'?"),
    ("T/s --space T/gone.yaml", None, "cannot read --space"),
    ("T/s", "train.lrr: [1]", "with train.lrr=1: unknown setting 'train.lrr'; did you mean 'train.lr'?"),
    ("T/s", "train.lr: [-1, 1]", "with train.lr=-1: train.lr is -1.0; it must be above 0"),
    ("T/s", "model.norm: [pre, middle]", "with model.norm=middle: model.norm"),
    ("T/s", "data.split.valid: [0.1, 0.2]", "'data.split.valid' cannot be searched"),
    ("T/s train.max_seconds=5", None, "train.max_seconds follows from --budget"),
    ("T/s train.lr=1e-3", None, "nothing is left to search"),
    ("P/audio", None, "is not a search but contains other files"),
    ("P/done --budget 2s", None, "--budget (was 1.0, is 2.0)"),
    ("P/done model.d_model=32", None, "model.d_model (was 16, is 32)"),
    ("P/done model=compressive_transformer", None, 'model.name (was "transformer_xl", is "compressive_transformer")'),
    ("P/done", "train.lr: {low: 1e-4, high: 1e-3}", "space.train.lr.low (was null, is 0.0001). Give another folder"),
    ("P/done --seed 1", None, "--seed (was 0, is 1)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("given", "text", "message"), MISTAKES)
def test_mistakes(given: str, text: str | None, message: str, place: Path, tmp_path: Path) -> None:
    folder, *more = words(given, place, tmp_path)
    command = tune(place, Path(folder), *(space(tmp_path, text) if text else ()), *map(str, more))
    assert message in mistake(command)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed database")  # optuna leaves a file open that it cannot read
def test_a_search_without_its_own_data_or_study(place: Path, tmp_path: Path) -> None:
    done = shutil.copytree(place / "done", tmp_path / "done")
    verb, _, *command = tune(place, done)
    assert "no such folder" in mistake([verb, tmp_path / "gone", *command])
    other = prepared_tones(tmp_path, train=2, valid=2, test=2)
    assert "contains another search: dataset.checksums.train (was " in mistake([verb, other, *command])
    (done / "study.db").write_bytes(b"no" * 5000)
    assert "study.db cannot be used (file is not a database)" in mistake(tune(place, done))
    gc.collect()  # while that warning is ignored


def test_without_optuna_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert 'pip install "waveform[tune]"' in mistake(["tune", tmp_path, tmp_path / "s"])


@pytest.mark.slow
def test_two_processes_share_a_study(place: Path, tmp_path: Path) -> None:
    """Begun at the same moment, each with a folder of its own: together they run the trials, and both know all."""
    storage = ["--storage", f"sqlite:///{tmp_path}/shared.db"]
    folders = [tmp_path / "one", tmp_path / "two"]
    commands = [tune(place, folder, *storage, trials=4, budget="0.3s") for folder in folders]
    processes = [
        forkserver.start(cli, *command, output=folder.with_suffix(".txt"), daemon=False)
        for command, folder in zip(commands, folders, strict=True)
    ]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    run_dirs = sorted(path for folder in folders for path in folder.glob("trial-*"))
    assert sorted(path.name for path in run_dirs) == [f"trial-{i:03d}" for i in range(4)]
    assert not (folders[0] / "study.db").exists()
    assert main(commands[0]) == 0  # all have ended
    entries = trials_of(folders[0])
    assert sorted(entry["trial"] for entry in entries) == [0, 1, 2, 3]
    assert {entry["run"] for entry in entries} - {None} == {str(path) for path in folders[0].glob("trial-*")}


@pytest.mark.slow
def test_two_machines_begin_the_last_trial_at_once(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    ask = search.Study.ask
    monkeypatch.setattr(search.Study, "ask", lambda study: (ask(study), ask(study))[1])  # the other one is first
    out_dir, storage = tmp_path / "s", ["--storage", f"sqlite:///{tmp_path}/shared.db"]
    assert "other machines are running all of them" in mistake(tune(place, out_dir, *storage, trials=1))
    assert not any(out_dir.glob("trial-*"))

    monkeypatch.undo()
    cli(*tune(place, out_dir, *storage, budget="1s", trials=2))  # what it gave back is begun
    assert [entry["trial"] for entry in trials_of(out_dir)] == [1]


def test_a_database_that_cannot_be_used(place: Path, tmp_path: Path) -> None:
    command = tune(place, tmp_path / "s", "--storage", "sqlite:////nowhere/of/all.db")
    assert "the database of --storage cannot be used (unable to open database file)" in mistake(command)
