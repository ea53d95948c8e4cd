"""Runs as a model hub knows them: the folder that `export --format hub` writes, and runs named hf://."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from hashlib import sha1
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from pytest import MonkeyPatch

import waveform
from tests.calling import Capsys, cli, figures_of, mistake
from tests.faults.small_runs import SETTINGS
from waveform.quality.figures import Figure, Quality, SetOfClips
from waveform.runs.hub import HUB_CONFIG_FILE
from waveform.speech.domain import Speech

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_ABOUT = ["--licence", "cc-by-4.0", "--language", "en", "--trained-on", "three sines: a, b & c"]
_PITCH = Figure("mean pitch", "Hz", 120.0, 110.0, 130.0)
_QUALITY = Quality([SetOfClips("real", 3, [_PITCH])], 9, _PITCH, seconds=2.0, temperature=1.0, seed=0)


@pytest.fixture(scope="module")
def place(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hub/, what `export --format hub` made of a run on speech, and figures.json of that."""
    place = tmp_path_factory.mktemp("place")
    figures = figures_of(place / "figures.json", "evaluate", speech / "run")
    (place / "figures.json").write_text(json.dumps(figures | {"quality": asdict(_QUALITY)}))
    cli("export", speech / "run", place / "hub", "--format", "hub", *_ABOUT, "--figures", place / "figures.json")
    return place


class _Hub(SimpleHTTPRequestHandler):
    """As much of a hub's interface as downloading needs: files by their paths, with the headers of its own."""

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{sha1(self.path.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        super().end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Path]:
    """A stand-in for a hub that serves a copy of hub/ as o/n, with a script beside it; yields the cache."""
    served, about = tmp_path / "served", tmp_path / "served/api/models/o/n"
    files = shutil.copytree(place / "hub", served / "o/n/resolve" / _COMMIT)
    (files / "setup.py").write_text("raise SystemExit")
    for part in ("tree", "revision"):
        (about / part).mkdir(parents=True)
    entries = [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0"} for path in files.iterdir()]
    for revision in ("main", _COMMIT):
        (about / "tree" / revision).write_text(json.dumps(entries))
        (about / "revision" / revision).write_text(json.dumps({"id": "o/n", "sha": _COMMIT}))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, directory=served))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    server.shutdown()
    server.server_close()


def test_the_card_says_what_the_user_said_and_what_was_measured(speech: Path, place: Path) -> None:
    card = (place / "hub" / "README.md").read_text()
    front, figures = yaml.safe_load(card.split("---")[1]), json.loads((place / "figures.json").read_text())
    assert front["license"] == "cc-by-4.0" and front["language"] == "en" and front["library_name"] == "waveform"
    (result,) = front["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == figures["nats_per_token"]
    assert result["dataset"]["name"] == _ABOUT[-1] and "of three sines: a, b & c." in card
    assert (
        f"{figures['nats_per_token']:.4f} nats" in card
        and f"state {figures['state']}); linear prediction alone" in card
    )
    assert "| quality [95% interval] | real (3) |\n| --- | --- |\n| mean pitch, Hz | 120.0 [110.0, 130.0] |" in card
    assert {path.name for path in (place / "hub").iterdir()} == {
        "README.md", "config.json", "learning-curve.png", "metrics.jsonl", "model.safetensors", "sample-0.flac",
        "sample-1.flac",
    }  # fmt: skip
    config = json.loads((place / "hub" / HUB_CONFIG_FILE).read_text())["config"]
    assert config["dataset"]["path"] == "" and str(speech) not in str(config)


@pytest.mark.parametrize(
    ("name", "licence", "source"),
    [("speech-en", "cc-by-sa-3.0", "recordings by Allison Smith"), ("speech-voices", "gpl-2.0", "fillets-ng-data-nl")],
)
def test_the_card_of_a_bundled_run_states_its_licence(
    name: str, licence: str, source: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(Speech, "examples", lambda self, run: {})
    cli("export", name, tmp_path / "hub", "--format", "hub", "--language", "en-us")
    card = (tmp_path / "hub" / "README.md").read_text()
    about = yaml.safe_load(card.split("---")[1])
    assert (about["license"], about["language"]) == (licence, "en-us")
    assert f"Licence: {licence}." in card and source in card and "the weights of another run" in card


def test_verbs_read_the_folder_as_they_do_the_run(speech: Path, place: Path, tmp_path: Path) -> None:
    sounds, figures = [], []
    for name, run in (("run", speech / "run"), ("hub", place / "hub")):
        cli("sample", run, "--out", tmp_path / name, "--seconds", 0.01)
        sounds += [path.read_bytes() for path in (tmp_path / name).iterdir()]
        figures += figures_of(tmp_path / "f.json", "compare", run, "--data", speech / "data")
    assert len(sounds) == 2 and sounds[0] == sounds[1]
    one, other = figures
    assert one["nats_per_token"] == other["nats_per_token"] and one["learning_curve"] == other["learning_curve"]


def test_a_training_that_goes_on_is_exported_as_it_was(
    speech: Path, place: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Sounds, figures and the log are of the weights that are in the folder."""
    run, load = shutil.copytree(speech / "run", tmp_path / "run"), Speech.load
    export = ["export", run, "--format", "hub"]

    def train(*_: object) -> dict[str, bytes]:
        waveform.train(speech / "data", run, [*SETTINGS, "train.max_steps=6"], show_progress=False)
        return {}

    def load_and_train(*given: Any, **options: Any) -> Any:
        loaded = load(*given, **options)
        train()
        return loaded

    with monkeypatch.context() as slow:
        slow.setattr(Speech, "examples", train)
        cli(*export, tmp_path / "slow")
    assert json.loads((tmp_path / "slow" / HUB_CONFIG_FILE).read_text())["checkpoint"] == "step_00000004"
    shutil.rmtree(run / "checkpoints" / "step_00000006")  # as if killed before it was saved
    cli(*export, tmp_path / "killed")
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (speech / "run" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(Speech, "load", staticmethod(load_and_train))
    assert "step (was 4, is 6)" in mistake([*export, tmp_path / "late", "--figures", place / "figures.json"])


def test_a_run_on_text_keeps_its_vocabulary(text: Path, tmp_path: Path) -> None:
    cli("export", text / "run", tmp_path / "hub", "--format", "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert 'license: "unknown"' in card
    (command,) = (line.split() for line in card.splitlines() if line.startswith("waveform sample"))
    cli("sample", tmp_path / "hub", *command[3:], "--tokens", "5")
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(program.replace("hf://OWNER/hub", str(tmp_path / "hub")), {})


def test_a_run_on_a_hub_is_downloaded_once_without_what_is_not_needed(
    hub: Path, speech: Path, tmp_path: Path, capsys: Capsys, monkeypatch: MonkeyPatch
) -> None:
    cli("sample", "hf://o/n", "--out", tmp_path / "wav", "--seconds", "0.01")
    assert f"hf://o/n@{_COMMIT} will always mean this one" in capsys.readouterr().out
    assert not list(hub.rglob("setup.py")) and not list(hub.rglob("README.md"))
    cli("sample", f"hf://o/n@{_COMMIT}", "--out", tmp_path / "again", "--seconds", "0.01")
    assert "always mean" not in capsys.readouterr().out
    (one,), (other,) = (list((tmp_path / name).iterdir()) for name in ("wav", "again"))
    assert one.read_bytes() == other.read_bytes()
    monkeypatch.chdir(tmp_path)
    cli("evaluate", "hf://o/n", "--data", speech / "audio")
    assert [path.name.endswith(".prepared") for path in tmp_path.iterdir()].count(True) == 1  # not in ./hf:/o


def test_a_name_that_no_hub_has_is_one_line(hub: Path) -> None:
    assert "cannot download hf:/o/other: " in mistake(["sample", "hf://o/other", "--out", "wav"])
    assert "cannot download hf:/a--b/c: " in mistake(["sample", "hf://a--b/c", "--out", "wav"])
    assert "give hf://owner/name or hf://owner/name@revision" in mistake(["sample", "hf://other", "--out", "w"])


def test_hostile_folders_are_refused(place: Path, tmp_path: Path) -> None:
    config = json.loads((place / "hub" / HUB_CONFIG_FILE).read_text())

    def refusal(name: str, content: str) -> str:
        copy = shutil.copytree(place / "hub", tmp_path / name)
        (copy / HUB_CONFIG_FILE).write_text(content)
        if name == "link":
            (copy / "model.safetensors").unlink()
            (copy / "model.safetensors").symlink_to(place / "hub" / "model.safetensors")
        return mistake(["sample", copy, "--out", tmp_path / "wav"])

    for fields, reason in (
        ({"checkpoint": "../../step_1"}, "is not a configuration that `waveform export` wrote"),
        ({"library_name": "transformers"}, "it is for the library 'transformers'"),
        ({"config": {"model": {"name": "os.system"}}}, "is damaged"),
        ({"progress": "{}"}, "checkpoint"),
    ):
        assert reason in refusal(next(iter(fields)), json.dumps(config | fields))
    assert "is not a configuration" in refusal("deep", '{"config": {"deep": ' + "[" * 100_000)
    assert "is not a configuration" in refusal("grammar", json.dumps(config | {"config": {"study": "${"}}))
    assert "is a link" in refusal("link", json.dumps(config))
    assert not (tmp_path / "wav").exists()


def test_what_does_not_fit_is_one_line(speech: Path, place: Path, tmp_path: Path) -> None:
    export, hub = ["export", speech / "run", tmp_path / "new"], ["--format", "hub"]
    assert "are for --format hub" in mistake([*export, "--licence", "mit"])
    assert "leave out --optimiser" in mistake([*export, *hub, "--optimiser"])
    other = tmp_path / "other.json"
    entry = json.loads((place / "figures.json").read_text())
    for change in ({"step": 7}, {"train_seconds": 7.0}, {"averaged_checkpoints": 2}):  # the second is of another seed
        other.write_text(json.dumps(entry | change))
        assert "evaluate it again" in mistake([*export, *hub, "--figures", other])
    for wrong in (
        [],
        {name: entry[name] for name in entry if name != "bits_per_token"},
        entry | {"nats_per_token": "low"},
        entry | {"quality": {"sets": [{"name": "real", "figures": [{"name": "pitch"}]}]}},
    ):
        other.write_text(json.dumps(wrong))
        assert "is not a file that `waveform evaluate" in mistake([*export, *hub, "--figures", other])
    assert "exists" in mistake(["export", speech / "run", place / "hub", *hub])
    assert not (tmp_path / "new").exists()
