"""Runs as a model hub knows them: the folder that `export --format hub` writes, and runs named hf://."""

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from tests.faults.small_runs import make_speech_run, make_text_run
from tests.test_cli import mistake
from waveform.cli import main
from waveform.runs.hub import HUB_CONFIG_FILE

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_ABOUT = ["--licence", "cc-by-4.0", "--language", "en", "--trained-on", "three sines: a, b & c"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/, a finished run on speech, hub/, what `export --format hub` made of it, and figures.json."""
    place = tmp_path_factory.mktemp("place")
    make_speech_run(place)
    assert main(["evaluate", str(place / "run"), "--json", str(place / "figures.json")]) == 0
    export = ["export", str(place / "run"), str(place / "hub"), "--format", "hub", *_ABOUT]
    assert main([*export, "--figures", str(place / "figures.json")]) == 0
    return place


class _Hub(BaseHTTPRequestHandler):
    """As much of a hub's interface as downloading needs; `/o/n` is the folder that `serving` gives."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self.folder = folder
        super().__init__(*arguments)

    def do_GET(self, *, body: bool = True) -> None:
        if self.path.startswith("/api/models/o/n/revision/"):
            content = json.dumps({"id": "o/n", "sha": _COMMIT}).encode()
        elif self.path.startswith(f"/api/models/o/n/tree/{_COMMIT}"):
            sizes = {path.name: path.stat().st_size for path in self.folder.iterdir()}
            files = [{"type": "file", "path": name, "size": size, "oid": "0"} for name, size in sizes.items()]
            content = json.dumps(files).encode()
        elif self.path.startswith(f"/o/n/resolve/{_COMMIT}/"):
            content = (self.folder / self.path.rpartition("/")[2]).read_bytes()
        else:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for a hub that serves a copy of hub/ with a script beside it; yields the cache."""
    shutil.copytree(place / "hub", tmp_path / "served")
    (tmp_path / "served" / "setup.py").write_text("raise SystemExit")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, tmp_path / "served"))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    server.shutdown()
    server.server_close()


def test_the_card_says_what_the_user_said_and_what_was_measured(place: Path) -> None:
    card = (place / "hub" / "README.md").read_text()
    front, figures = yaml.safe_load(card.split("---")[1]), json.loads((place / "figures.json").read_text())
    assert front["license"] == "cc-by-4.0" and front["language"] == "en" and front["library_name"] == "waveform"
    (result,) = front["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == figures["nats_per_token"]
    assert result["dataset"]["name"] == _ABOUT[-1] and "of three sines: a, b & c." in card
    assert f"{figures['nats_per_token']:.4f} nats" in card and "linear prediction alone" in card
    names = {path.name for path in (place / "hub").iterdir()}
    assert names == {
        "README.md", "config.json", "learning-curve.png", "metrics.jsonl", "model.safetensors", "sample-0.flac",
        "sample-1.flac",
    }  # fmt: skip
    config = json.loads((place / "hub" / HUB_CONFIG_FILE).read_text())["config"]
    assert config["dataset"]["path"] == "" and str(place) not in str(config)


def test_verbs_read_the_folder_as_they_do_the_run(place: Path, tmp_path: Path) -> None:
    for run in ("run", "hub"):
        assert main(["sample", str(place / run), "--out", str(tmp_path / run), "--seconds", "0.01"]) == 0
        data = ["--data", str(place / "data"), "--json", str(tmp_path / f"{run}.json")]
        assert main(["compare", str(place / run), *data]) == 0
    (one,), (other,) = (list((tmp_path / run).iterdir()) for run in ("run", "hub"))
    assert one.read_bytes() == other.read_bytes()
    (one,), (other,) = (json.loads((tmp_path / f"{run}.json").read_text()) for run in ("run", "hub"))
    assert one["nats_per_token"] == other["nats_per_token"] and one["learning_curve"] == other["learning_curve"]


def test_a_run_on_text_keeps_its_vocabulary(tmp_path: Path) -> None:
    make_text_run(tmp_path)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hub"), "--format", "hub"]) == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    assert 'license: "unknown"' in card
    (command,) = (line.split() for line in card.splitlines() if line.startswith("waveform sample"))
    assert main(["sample", str(tmp_path / "hub"), *command[3:], "--tokens", "5"]) == 0
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(program.replace("hf://OWNER/hub", str(tmp_path / "hub")), {})


def test_a_run_on_a_hub_is_downloaded_once_without_what_is_not_needed(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", "hf://o/n", "--out", str(tmp_path / "wav"), "--seconds", "0.01"]) == 0
    assert f"hf://o/n@{_COMMIT} will always mean this one" in capsys.readouterr().out
    assert not list(hub.rglob("setup.py")) and not list(hub.rglob("README.md"))
    assert main(["sample", f"hf://o/n@{_COMMIT}", "--out", str(tmp_path / "again"), "--seconds", "0.01"]) == 0
    assert "always mean" not in capsys.readouterr().out
    (one,), (other,) = (list((tmp_path / name).iterdir()) for name in ("wav", "again"))
    assert one.read_bytes() == other.read_bytes()


def test_a_name_that_no_hub_has_is_one_line(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot download hf:/o/other: " in mistake(["sample", "hf://o/other", "--out", "wav"], capsys)
    assert "cannot download hf:/a--b/c: " in mistake(["sample", "hf://a--b/c", "--out", "wav"], capsys)
    assert "give hf://owner/name or hf://owner/name@revision" in mistake(["sample", "hf://other", "--out", "w"], capsys)


def _edit(hub: Path, **fields: object) -> None:
    path = hub / HUB_CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_hostile_folders_are_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (fields, reason) in enumerate(
        [
            ({"checkpoint": "../../step_1"}, "is not a configuration that `waveform export` wrote"),
            ({"library_name": "transformers"}, "it is of 'transformers'"),
            ({"config": {"model": {"name": "os.system"}}}, "is damaged"),
            ({"progress": "{}"}, "checkpoint"),
        ]
    ):
        copy = tmp_path / str(number)
        shutil.copytree(place / "hub", copy)
        _edit(copy, **fields)
        assert reason in mistake(["sample", str(copy), "--out", str(tmp_path / "wav")], capsys)
    deep = tmp_path / "deep"
    shutil.copytree(place / "hub", deep)
    (deep / HUB_CONFIG_FILE).write_text('{"config": {"deep": ' + "[" * 100_000)
    assert "is not a configuration" in mistake(["sample", str(deep), "--out", str(tmp_path / "wav")], capsys)
    copy = tmp_path / "link"
    shutil.copytree(place / "hub", copy)
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to(place / "hub" / "model.safetensors")
    assert "is a link" in mistake(["sample", str(copy), "--out", str(tmp_path / "wav")], capsys)
    assert not (tmp_path / "wav").exists()


def test_what_does_not_fit_is_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export, hub = ["export", str(place / "run"), str(tmp_path / "new")], ["--format", "hub"]
    assert "are for --format hub" in mistake([*export, "--licence", "mit"], capsys)
    assert "leave out --optimiser" in mistake([*export, *hub, "--optimiser"], capsys)
    other = tmp_path / "other.json"
    entry = json.loads((place / "figures.json").read_text())
    other.write_text(json.dumps(entry | {"step": 7}))
    assert "evaluate it again" in mistake([*export, *hub, "--figures", str(other)], capsys)
    for wrong in (
        [],
        {name: entry[name] for name in entry if name != "bits_per_token"},
        entry | {"nats_per_token": "low"},
        entry | {"quality": {"sets": [{"name": "real", "figures": [{"name": "pitch"}]}]}},
    ):
        other.write_text(json.dumps(wrong))
        assert "is not a file that `waveform evaluate" in mistake([*export, *hub, "--figures", str(other)], capsys)
    assert "exists" in mistake(["export", str(place / "run"), str(place / "hub"), *hub], capsys)
    assert not (tmp_path / "new").exists()
