"""Versions that waveform was not tested with."""

from pytest import MonkeyPatch

from tests.calling import Capsys
from waveform.system import versions


def test_a_version_beyond_those_tested_is_named(monkeypatch: MonkeyPatch, capsys: Capsys) -> None:
    versions.warn_of_untested()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(versions, "version", {"torch": "9.0.1", "numba": "0.65.0"}.get)
    versions.warn_of_untested()
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "and this is 9.0.1" in line and 'try pip install "torch' in line
