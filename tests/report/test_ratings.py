"""Ratings from files: means by run, with intervals over sounds; and files that are something else."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.calling import cli, mistake
from waveform.report_page.ratings import rate
from waveform.system.errors import UserError


def write(path: Path, ratings: list[tuple[str, int, Any]], *, sounds: str = "a", **changed: Any) -> Path:
    entries = [{"row": row, "title": "t", "run": run, "rating": rating} for run, row, rating in ratings]
    path.write_text(json.dumps({"kind": "waveform ratings", "sounds": sounds, "ratings": entries, **changed}))
    return path


def test_listeners_are_averaged_before_sounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "1.json", [("wavenet", 0, 1), ("ct", 0, 4), ("ct", 1, 2)])
    second = write(tmp_path / "2.json", [("ct", 0, 2), ("ct", 2, 4)])
    other_page = write(tmp_path / "3.json", [("ct", 0, 3)], sounds="b")
    entries = rate([first, second, other_page], json_file=tmp_path / "means.json")
    ct, wavenet = entries  # the best first
    assert ct["run"] == "ct" and ct["num_sounds"] == 4 and ct["num_ratings"] == 5
    assert ct["mean"] == pytest.approx((3 + 2 + 4 + 3) / 4)
    half = 3.1824463 * (2 / 3) ** 0.5 / 2  # Student's t of three degrees of freedom; values 3, 2, 4, 3
    assert ct["interval_95"] == pytest.approx([3 - half, 3 + half])
    assert wavenet["mean"] == 1 and wavenet["interval_95"] is None
    assert json.loads((tmp_path / "means.json").read_text()) == entries
    printed = capsys.readouterr().out
    assert "3.00 [1.70, 4.30]" in printed and "3 listeners" in printed
    assert rate([first, tmp_path / "." / "1.json", first]) == rate([first])  # one listener, named again


def test_the_command_takes_ratings_instead_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli("report", "--ratings", write(tmp_path / "1.json", [("\x1b[31mct", 0, 4)]))
    printed = capsys.readouterr().out
    assert "\\x1b[31mct" in printed and "\x1b" not in printed  # a name must not steer the terminal
    assert "name at least one run folder" in mistake(["report"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1, 2]",
        b"\xff",
        b"[" * 100_000,
        b'{"kind": "waveform ratings", "sounds": "a"}',
        b'{"kind": "waveform ratings", "sounds": "a", "ratings": [{"row": 0, "title": "t", "run": "r", "rating": 6}]}',
        b'{"kind": "other", "sounds": "a", "ratings": []}',
    ],
)
def test_what_is_not_ratings_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json is not what a report's blind mode exports"):
        rate([tmp_path / "a.json"])


def test_no_ratings_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no ratings"):
        rate([write(tmp_path / "a.json", [])])
    with pytest.raises(UserError, match=r"cannot read --ratings .*no such file"):
        rate([tmp_path / "b.json"])
