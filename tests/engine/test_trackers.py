"""What shows a training besides metrics.jsonl: TensorBoard; wandb and Trackio, stand-ins with their interface."""

import math
import sys
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pytest import MonkeyPatch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.calling import Capsys, mistake
from tests.faults.small_runs import SETTINGS, write_audio
from waveform.cli import main
from waveform.engine.metrics import read_metrics
from waveform.engine.trackers import SERVICES, EventFile, open_tracker

_SAMPLING = [setting for setting in SETTINGS if not setting.startswith("train.sample_seconds")]


def curve(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_events_are_on_the_disk_at_once_and_purged_by_a_resumed_run(tmp_path: Path) -> None:
    first = EventFile(tmp_path, purge_step=1)
    for step in (1, 2, 3):
        first.add_scalars({"loss": 0.5 * step}, step)
    assert curve(tmp_path) == [(1, 0.5), (2, 1.0), (3, 1.5)]  # not closed
    second = EventFile(tmp_path, purge_step=3)
    second.add_scalars({"loss": 9.0}, 3)
    assert curve(tmp_path) == [(1, 0.5), (2, 1.0), (3, 9.0)]
    first.close(), second.close()


class _Run:
    def __init__(self, given: dict[str, Any], fails_at: float) -> None:
        self.given, self.fails_at = given, fails_at
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0

    def log(self, values: dict[str, Any], *, step: int) -> None:
        if step >= self.fails_at:
            raise ConnectionError("no route to host")
        assert not self.finished
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


class _Service(ModuleType):
    """Notes what it is called with; raises from step `fails_at`. As Trackio, a new run ends the current one."""

    def __init__(self, name: str, fails_at: float = math.inf) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.runs: list[_Run] = []
        self.fails_at = fails_at
        self.Audio = lambda samples, *, sample_rate: ("audio", sample_rate)
        self.Image = lambda image: ("image", image.ndim)
        self.current: ContextVar[_Run | None] = ContextVar("current", default=None)

    def init(self, **given: Any) -> "_Run":
        if (before := self.current.get()) is not None:
            before.finish()
        self.runs.append(_Run(given, self.fails_at))
        self.current.set(self.runs[-1])
        return self.runs[-1]


def train(tmp_path: Path, monkeypatch: MonkeyPatch, service: _Service, *settings: str) -> None:
    monkeypatch.setitem(sys.modules, service.__name__, service)
    if not (tmp_path / "audio").exists():
        write_audio(tmp_path / "audio")
    command = ["train", str(tmp_path / "audio"), str(tmp_path / "runs" / "run"), *_SAMPLING, *settings]
    assert main([*command, f"train.log={service.__name__}", "train.sample_seconds=0.01"]) == 0


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_gets_what_the_log_has_and_a_sample(name: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    service = _Service(name)
    train(tmp_path, monkeypatch, service)
    (run,) = service.runs
    given = run.given
    assert given["project"] == "runs" and given["name"] == "run" and run.finished == 1
    assert name != "wandb" or (given["mode"] == "offline" and given["dir"] == str(tmp_path / "runs" / "run"))
    records = read_metrics(tmp_path / "runs" / "run")
    scalars = [(step, values) for step, values in run.logged if len(values) > 1]
    assert [step for step, _ in scalars] == [record["step"] for record in records]
    assert scalars[0][1]["train/nll_nats"] == records[0]["nll_nats"]
    assert [values for step, values in run.logged if step == 4 and len(values) == 1] == [
        {"sample": ("audio", 24_000)},
        {"sample/mel": ("image", 3)},
    ]
    assert not (tmp_path / "runs" / "run" / "tensorboard").exists()
    train(tmp_path, monkeypatch, service, "train.max_steps=6")  # resumed under the same name
    assert service.runs[1].given == given


@pytest.mark.parametrize("name", SERVICES)
def test_trainings_in_turn_have_a_run_each(name: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    service = _Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    trackers = [open_tracker(name, tmp_path / run, purge_step=0) for run in "ab"]
    for step in range(2):
        for tracker, value in zip(trackers, (1.0, 2.0), strict=True):
            tracker.add_scalars({"x": value}, step)
    assert [run.given["name"] for run in service.runs] == ["a", "b"]
    assert [[values["x"] for _, values in run.logged] for run in service.runs] == [[1, 1], [2, 2]]


def test_a_service_that_fails_ends_nothing(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    train(tmp_path, monkeypatch, _Service("wandb", fails_at=2))
    assert capsys.readouterr().err.count("logging to wandb has stopped (no route to host)") == 1
    assert read_metrics(tmp_path / "runs" / "run")[-1]["step"] == 4


def test_what_is_not_installed_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    write_audio(tmp_path / "audio")
    monkeypatch.setattr("waveform.engine.trackers.find_spec", lambda name: None)
    command = ["train", str(tmp_path / "audio"), str(tmp_path / "run")]
    assert 'pip install "waveform[wandb]"' in mistake([*command, "train.log=wandb"])
    assert "train.log is 'nosuch'; choose tensorboard" in mistake([*command, "train.log=nosuch"])
    assert not (tmp_path / "run").exists()
