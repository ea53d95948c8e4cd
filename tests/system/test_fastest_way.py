"""Which way is taken: the known one, unless another is clearly faster; what is kept on disk, and what ignored there."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from waveform.system import fastest_way
from waveform.system.fastest_way import SETTING, Question

_DURATION_S = {"known": 0.0020, "faster": 0.0015, "hardly faster": 0.00195}


@pytest.fixture(name="ask")
def make_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """ask(other): the way that a new process takes, which may have been written down under `tmp_path`."""
    monkeypatch.setenv(SETTING, "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(fastest_way, "questions", {})
    monkeypatch.setattr(fastest_way, "_file", lambda: tmp_path / "ways.json")
    clock = 0.0

    def call(way: str) -> Callable[[], None]:
        def advance() -> None:
            nonlocal clock
            clock += _DURATION_S[way]

        return advance

    monkeypatch.setattr(time, "thread_time", lambda: clock)

    def ask(other: str) -> str:
        monkeypatch.setattr(fastest_way, "taken", {})
        ways = ("known", other)
        question = Question("sums", ways, known=lambda: "known", calls=lambda: {way: call(way) for way in ways})
        assert fastest_way.fastest_way(question) == fastest_way.fastest_way(question)
        return fastest_way.fastest_way(question)

    return ask


def test_the_faster_one_is_taken_and_said_once(ask: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("faster") == "faster"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sums by faster on this processor, timed once: known 2.0 ms, faster 1.5 ms (")
    assert ask("faster") == "faster"
    assert capsys.readouterr().err == ""


def test_noise_changes_nothing(ask: Callable[[str], str]) -> None:
    assert ask("hardly faster") == "known"


def test_what_was_timed_is_kept(ask: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("faster") == "faster"
    monkeypatch.setitem(_DURATION_S, "faster", 1.0)
    assert ask("faster") == "faster"
    monkeypatch.setenv(SETTING, "0")
    assert ask("faster") == "known"


@pytest.mark.parametrize("change", ["garbage", "another shape", "a missing way", "another processor"])
def test_ignores_what_does_not_fit(
    change: str, ask: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "ways.json"
    assert ask("faster") == "faster"
    monkeypatch.setitem(_DURATION_S, "faster", 1.0)
    if change == "another processor":
        monkeypatch.setattr(fastest_way, "cpu_name", lambda: "another one")
    else:
        text = file.read_text()
        file.write_text({"garbage": text[:-9], "another shape": '{"a": 1}'}.get(change, text.replace("fast", "slow")))
    assert ask("faster") == "known"
    assert len(json.loads(file.read_text())) == 1 + (change == "another processor")


def test_a_folder_that_cannot_be_written_is_no_trouble(ask: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "ways.json").mkdir()
    assert ask("faster") == "faster"
