"""Which library is taken: torch's own, unless the other is clearly faster; what is kept, and what is ignored there."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch

from tests.calling import Capsys
from waveform.system import linear_layers
from waveform.system.linear_layers import SETTING, fastest_library

Ask = Callable[[float], str]


@pytest.fixture(name="ask")
def make_ask(monkeypatch: MonkeyPatch, tmp_path: Path) -> Ask:
    """ask(gain): what a new process takes if oneDNN is so many times as fast, unless `ways.json` says it."""
    monkeypatch.setenv(SETTING, "1")
    monkeypatch.setattr(linear_layers, "_file", lambda: tmp_path / "ways.json")
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: sum(clock))

    def ask(gain: float) -> str:
        monkeypatch.setattr(linear_layers, "taken", None)
        calls = {"torch": lambda: clock.append(0.002), "onednn": lambda: clock.append(0.002 / gain)}
        monkeypatch.setattr(linear_layers, "_calls", lambda: calls)
        return fastest_library()

    return ask


def test_what_is_clearly_faster_is_taken_said_and_kept(ask: Ask, capsys: Capsys, monkeypatch: MonkeyPatch) -> None:
    assert ask(2) == "onednn"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("matrix products by onednn here, timed once: torch 2.0 ms, onednn 1.0 ms (")
    assert ask(0.5) == "onednn"
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(SETTING, "0")
    assert ask(2) == "torch"


def test_noise_changes_nothing(ask: Ask) -> None:
    assert ask(1.04) == "torch"


@pytest.mark.parametrize("written", ["garbage", "another shape", "an unknown one", "of another processor", "a folder"])
def test_ignores_what_does_not_fit(written: str, ask: Ask, monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "ways.json"
    if written == "a folder":  # that cannot be written to, either
        file.mkdir()
    else:
        ask(0.5)
        text = file.read_text()
        file.write_text({"garbage": "{", "another shape": "[1]"}.get(written, text.replace('"torch"', '"third"')))
    if written == "of another processor":
        file.write_text(text)
        monkeypatch.setattr(linear_layers, "cpu_name", lambda: "another one")
    assert ask(2) == "onednn"
    assert file.is_dir() or len(json.loads(file.read_text())) == 1 + (written == "of another processor")


@pytest.mark.usefixtures("ask")
def test_gradients_are_timed_where_there_is_no_autograd(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    """The first product of a process may be made without autograd; what is timed has a backward pass."""

    def calls() -> dict[str, Callable[[], object]]:
        x = torch.ones(3, requires_grad=True)
        return {"torch": lambda: torch.autograd.grad(x.sum(), x)}

    monkeypatch.setattr(linear_layers, "_calls", calls)
    monkeypatch.setattr(linear_layers, "taken", None)
    with torch.inference_mode():
        assert fastest_library() == "torch"
    assert (tmp_path / "ways.json").exists()
