"""Progress where there is no terminal: plain lines with rate, ETA and speed in x real time."""

import pytest

from waveform.system import progress
from waveform.system.progress import Progress


def test_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with Progress("score", total=48_000, unit="sample", unit_s=1 / 24_000) as bar:
        for _ in range(4):
            bar.update(6_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("score: ") and "\r" not in line for line in lines)
    assert "24,000/48,000 sample (50%)" in lines[-1]
    assert "sample/s" in lines[-1] and "ETA" in lines[-1] and "x real time" in lines[-1]


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("quiet", total=1, unit="step", enabled=False) as bar:
        bar.update()
        bar.write("nothing")
    assert capsys.readouterr().err == ""
