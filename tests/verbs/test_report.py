"""`waveform report` from the command: a page of small runs on synthesised audio, and what it is given wrongly."""

import base64
import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import soundfile
from pytest import MonkeyPatch

from tests.calling import Capsys, cli, figures_of, mistake, prepared_tones, settings
from tests.engine.conftest import write_utterances
from waveform.audio.audio_format import AudioFormat
from waveform.cli import main
from waveform.speech.report import ALONE, _recordings, _symptoms

NAME = "<b>odd $name"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    prepared_tones(place, train=2, valid=1, test=3)
    for name, model in (("ct", "compressive_transformer"), (NAME, "wavenet"), ("other", "wavenet")):
        cli("train", place / "data", place / name, *settings(model))
    return place


def sounds(row: str) -> list[np.ndarray]:
    contents = re.findall(r"data:audio/flac;base64,([^\"]+)", row)
    return [soundfile.read(io.BytesIO(base64.b64decode(content)))[0] for content in contents]


@pytest.mark.slow
def test_a_page_of_three_runs(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    page = tmp_path / "new" / "page.html"
    runs = [place / name for name in ("ct", NAME, "other")]
    options = ["--num", 2, "--seconds", 0.1, "--real", 2, "--temperatures", 0.8, 1.2, "--seed", 3]
    figures = figures_of(tmp_path / "f.json", "report", *runs, "--out", page, *options)
    assert f"{page}: open it" in capsys.readouterr().out
    html = page.read_text()
    labels = ["compressive_transformer", "wavenet (&lt;b&gt;odd $name)", "wavenet (other)"]
    rows = re.split(r'<div class="row"', html)[1:]
    titles = [title for row in rows for title in re.findall(r"<h3>(.*?)</h3>", row)]
    drawn = [f"temperature {temperature}, number {i}" for temperature in (0.8, 1.2) for i in (1, 2)]
    assert [title.partition(",")[2].strip() for title in titles[:6]] == [*["continued at temperature 0.8"] * 2, *drawn]
    for row in rows[:2]:
        assert re.findall(r'data-label="(.*?)"', row) == ["real speech", *labels]
        real, *continued = sounds(row)
        assert len(real) == 2400
        for sound in continued:  # the same beginning, then the run's own
            assert len(sound) == 2400
            np.testing.assert_array_equal(sound[:600], real[:600])
            assert not np.array_equal(sound, real)
    for row in rows[2:]:
        assert re.findall(r'data-label="(.*?)"', row) == labels
        made = sounds(row)
        assert len(made) == 3 and {len(sound) for sound in made} == {2400}
    assert "Attention by position" in html and "NLL over the course" in html and "NLL in training" in html
    assert 'id="quality"' not in html and "<td>model.num_stacks</td>" in html and "<b>" not in html
    for ours, theirs in zip(figures["comparison"], figures_of(tmp_path / "c.json", "compare", *runs), strict=True):
        assert ours["nats_per_token"] == pytest.approx(theirs["nats_per_token"], abs=1e-6)
        assert ours["num_utterances"] == theirs["num_utterances"] == 3
    assert figures["by_place"][0]["label"] == "compressive_transformer"
    assert figures["by_place"][0]["edges"][:3] == [0, 240, 480]


def test_runs_that_are_only_listened_to(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    page, other, alike = tmp_path / "a.html", str(place / "other"), "compressive_transformer"
    monkeypatch.chdir(tmp_path)
    Path(alike).symlink_to(place / NAME)  # called like the model of the run with figures
    options = ["--real", 1, "--num", 1, "--seconds", 0.05, "--temperatures", 1, "--listen", other, alike]
    figures = figures_of(tmp_path / "f.json", "report", place / "ct", "--out", page, *options)
    html, row = page.read_text(), ["compressive_transformer", other, f"{alike} (--listen)"]
    assert re.findall(r'data-label="(.*?)"', html) == ["real speech", *row, *row]
    assert [entry["model"] for entry in figures["comparison"]] == ["compressive_transformer"]
    assert "model.num_stacks" not in html


def test_linear_prediction_alone_is_listened_to(place: Path, tmp_path: Path) -> None:
    run, without, page = place / "ct", tmp_path / "without", tmp_path / "a.html"
    options = ["--real", 0, "--num", 1, "--seconds", 0.05, "--temperatures", 1, "--listen", "linear-prediction"]
    cli("report", run, "--out", page, *options)
    labels, (own, alone) = re.findall(r'data-label="(.*?)"', page.read_text()), sounds(page.read_text())
    assert labels == ["compressive_transformer", "linear-prediction"]
    assert len(own) == len(alone) == 1200 and alone.any() and not np.array_equal(own, alone)
    cli("train", place / "data", without, *settings("wavenet"), "model.prediction=none")
    line = mistake(["report", without, "--out", tmp_path / "b.html", *options])
    assert "--listen linear-prediction is for runs with model.prediction=linear; leave it out" in line


def test_a_recording_cannot_be_told_by_its_length(place: Path, tmp_path: Path) -> None:
    """In blind mode a page shows how long each sound is."""
    page, options = tmp_path / "a.html", ["--real", 1, "--num", 0, "--seconds", 0.5]
    cli("report", place / "ct", "--out", page, *options)
    real, continued = sounds(page.read_text())
    assert len(real) == len(continued) == 9600  # of 0.4 s
    assert "0.1 s of it, continued" in page.read_text()


def test_recordings_begin_with_speech(tmp_path: Path) -> None:
    silence, loud = (np.full(20_000, token, dtype=np.uint8) for token in (128, 255))
    tokens = write_utterances(tmp_path / "a.shard", [silence[:100], np.append(silence, loud)], vocab_size=256)
    ((name, samples),) = _recordings(tokens, AudioFormat(), num=1, seconds=0.5)
    assert name == "utterance_001" and len(samples) == 12_000
    assert np.flatnonzero(samples > 0.5)[0] == 0.05 * 24_000
    fewer = _recordings(tokens, AudioFormat(), num=9, seconds=0.5)  # than asked for, and one that is shorter
    assert [len(samples) for _, samples in fewer] == [100, 12_000]


_RATE_HZ = 16_000
_LOUD, _SILENCE = 0.1 * np.random.default_rng(0).standard_normal(2 * _RATE_HZ), np.zeros(2 * _RATE_HZ)


@pytest.mark.parametrize(
    ("drawn", "symptom"),
    [
        (_LOUD, None),
        (np.append(_LOUD[:_RATE_HZ], _SILENCE), "ct falls silent in 66% of what it draws: raise"),
        (np.sign(_LOUD), "ct clips in 100% of what it draws: lower its temperature"),
        (np.zeros(100), None),  # too short to tell
    ],
)
def test_what_is_wrong_is_said_with_what_helps(drawn: np.ndarray, symptom: str | None) -> None:
    found = _symptoms({"ct": drawn, ALONE: _SILENCE}, rate=_RATE_HZ)
    assert len(found) == (symptom is not None)
    assert symptom is None or found[0].startswith(symptom)


def test_a_page_is_written_though_nobody_reads_the_table(place: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    options = ["--out", tmp_path / "page.html", "--real", "0", "--num", "0"]
    with os.fdopen(writing, "w", buffering=1) as pipe, redirect_stdout(pipe):
        main(["report", *map(str, [place / "ct", *options])])
    assert (tmp_path / "page.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("CT CT", "is named twice"),
        ("CT --listen CT", "is named twice"),
        ("CT --listen CT/nosuch", "no such run folder"),
        ("--listen CT", "name at least one run folder"),
        ("CT --num -1", "--num is -1"),
        ("CT --quality 2", "--quality is 2; it must be at least 3"),
        ("CT --seconds 0", "seconds is 0"),
        ("CT --seconds 1e6", "--seconds is 1000000.0; it must be at most 3600"),
        ("CT --temperatures -1", "temperature is -1"),
        ("CT --temperatures 1 0.9 1", "--temperatures has 1 twice"),
        ("CT --tokens 0", "--tokens is 0"),
        ("CT --out CT", "it is a folder"),
        ("CT --out CT/config.yaml", "config.yaml exists, and is not a page that report wrote; give another"),
        ("CT --json ./report.html", "the figures and the page would be one file, report.html; give --json another"),
        ("CT/nosuch", "no such run folder"),
    ],
)
def test_mistakes(arguments: str, says: str, place: Path) -> None:
    assert says in mistake(["report", *arguments.replace("CT", str(place / "ct")).split()])
