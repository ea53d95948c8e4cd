"""Which way is taken: the first, unless another is clearly faster; what is kept on disk, and what is ignored there."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from waveform.system import fastest_way
from waveform.system.fastest_way import SETTING, Question


@pytest.fixture(name="ask")
def make_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], str]:
    """ask(gain): what a new process takes if the second way is so many times as fast, unless `ways.json` says it."""
    monkeypatch.setenv(SETTING, "1")
    monkeypatch.setattr(fastest_way, "questions", {})
    monkeypatch.setattr(fastest_way, "_file", lambda: tmp_path / "ways.json")
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: sum(clock))

    def ask(gain: float) -> str:
        monkeypatch.setattr(fastest_way, "taken", {})
        calls = {"first": lambda: clock.append(0.002), "second": lambda: clock.append(0.002 / gain)}
        question = Question("sums", tuple(calls), lambda: calls)
        return fastest_way.fastest_way(question)

    return ask


def test_what_is_clearly_faster_is_taken_said_and_kept(
    ask: Callable[[float], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(2) == "second"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sums by second here, timed once: first 2.0 ms, second 1.0 ms (")
    assert ask(0.5) == "second"
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(SETTING, "0")
    assert ask(2) == "first"


def test_noise_changes_nothing(ask: Callable[[float], str]) -> None:
    assert ask(1.04) == "first"


@pytest.mark.parametrize("written", ["garbage", "another shape", "an unknown way", "of another processor", "a folder"])
def test_ignores_what_does_not_fit(
    written: str, ask: Callable[[float], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "ways.json"
    if written == "a folder":  # that cannot be written to, either
        file.mkdir()
    else:
        ask(0.5)
        text = file.read_text()
        file.write_text({"garbage": "{", "another shape": "[1]"}.get(written, text.replace("first", "third")))
    if written == "of another processor":
        file.write_text(text)
        monkeypatch.setattr(fastest_way, "cpu_name", lambda: "another one")
    assert ask(2) == "second"
    assert file.is_dir() or len(json.loads(file.read_text())) == 1 + (written == "of another processor")


def test_gradients_are_timed_where_there_is_no_autograd(ask: Callable[[float], str]) -> None:
    """The first product of a process may be made without autograd; what is timed has a backward pass."""

    def calls() -> dict[str, Callable[[], object]]:
        x = torch.ones(3, requires_grad=True)
        return {"first": lambda: torch.autograd.grad(x.sum(), x)}

    ask(1)
    with torch.inference_mode():
        assert fastest_way.fastest_way(Question("products", ("first",), calls)) == "first"
