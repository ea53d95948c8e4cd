"""Progress: lines with rate, ETA and speed in x real time, in place on a terminal; nothing may stop the work."""

import itertools
import os

import pytest
from pytest import MonkeyPatch

from tests.calling import Capsys
from waveform.system import progress
from waveform.system.progress import Progress


def tick(monkeypatch: MonkeyPatch, *, every_s: int) -> None:
    """Let so much time pass between one look at the clock and the next."""
    clock = itertools.count(step=every_s)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))


def test_plain_lines(monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    tick(monkeypatch, every_s=5)
    with Progress("score", total=48_000, unit="sample", unit_s=1 / 24_000) as bar:
        for _ in range(4):
            bar.update(6_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("score: ") and "\r" not in line for line in lines)
    assert "24,000/48,000 samples (50%)" in lines[-1]
    assert "samples/s" in lines[-1] and "ETA" in lines[-1] and "x real time" in lines[-1]


def test_an_eta_waits_until_the_start_does_not_count(monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("train", total=1000, unit="s", initial=500) as bar:
        now = 100.0  # it took 98 s to begin
        bar.update(2)
        now = 110.0
        bar.update(10)
    assert capsys.readouterr().err.splitlines() == ["train: 502/1,000 s (50%)", "train: 512/1,000 s (51%), ETA 4473 s"]
    with Progress("train", total=50_000, unit="step") as bar:
        now += 400
        bar.update(8)
    assert capsys.readouterr().err == "train: 8/50,000 steps (0%), 0.02 steps/s, ETA 694.3 hours\n"


def test_the_last_line_is_printed_once(monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    for pause_s in (20.0, 0.1):  # whether the last update is reported at once, or is left to the end
        now = 0.0
        with Progress("train", total=2, unit="step") as bar:
            now += 20.0
            bar.update()
            now += pause_s
            bar.update()
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(" step")[0] for line in lines] == ["train: 1/2", "train: 2/2"]


def test_on_a_terminal_one_line_is_kept_up_to_date(monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    tick(monkeypatch, every_s=1)
    monkeypatch.setenv("COLUMNS", "24")
    with Progress("train", total=2, unit="step") as line:
        line.update()
        line.write("hello")
        line.update()
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert shown == ["", "train: 1/2 steps (50%),", "hello\n", "train: 2/2 steps (100%)\n"]


def test_a_terminal_that_is_gone_stops_nothing(monkeypatch: MonkeyPatch) -> None:
    terminal, other = os.openpty()
    with open(other, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with Progress("train", total=2, unit="step") as line:
            os.close(terminal)
            monkeypatch.setattr(progress, "_IN_PLACE_INTERVAL_S", 0.0)
            line.update()
            line.write("hello")


@pytest.mark.parametrize("enabled", [True, False])
def test_work_that_ends_before_the_first_line_prints_none(enabled: bool, capsys: Capsys) -> None:
    with Progress("short", total=1, unit="step", enabled=enabled) as bar:
        bar.update()
        if not enabled:
            bar.write("nothing")
    assert capsys.readouterr().err == ""


def test_parts_of_a_second_are_shown(monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    tick(monkeypatch, every_s=20)
    with Progress("sample", total=0.1, unit="s") as bar:
        bar.update(0.04)
    assert capsys.readouterr().err.startswith("sample: 0.04/0.10 s (40%)")
