"""`evaluate --quality` and `compare --quality` on a tiny run: what they draw, print and write."""

from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.calling import Capsys, cli, figures_of, mistake
from tests.faults.small_runs import WAVENET_SETTINGS
from tests.quality.test_figures import RATE_HZ, voice
from waveform.domain import TokenDomain
from waveform.quality import measure
from waveform.quality.clip import Clip, measure_clip
from waveform.runs.opened import average_weights
from waveform.speech.run import load


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/, on data/ with a few seconds of made-up voices."""
    place = tmp_path_factory.mktemp("place")
    for split, num in (("train", 4), ("valid", 1), ("test", 2)):
        (place / "audio" / split).mkdir(parents=True)
        for i in range(num):
            samples = voice(150 + 30 * i, seconds=2.1, seed=10 * num + i)
            soundfile.write(place / "audio" / split / f"{i}.wav", samples, RATE_HZ)
    cli("prepare", place / "audio", place / "data")
    cli("train", place / "data", place / "run", *WAVENET_SETTINGS)
    return place


_measured: dict[bytes, Clip] = {}


def measure_once(samples: np.ndarray, *, sample_rate_hz: int, opinions: dict[str, float]) -> Clip:
    """The tests hear the same clips again and again."""
    assert sample_rate_hz == RATE_HZ and not opinions
    key = samples.tobytes()
    if key not in _measured:
        _measured[key] = measure_clip(samples, sample_rate_hz=sample_rate_hz)
    return _measured[key]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a small measurement, without what is perhaps installed besides."""
    monkeypatch.setattr(measure, "predictors", dict)
    monkeypatch.setattr(measure, "measure_clip", measure_once)
    return ["--quality", "--num", "3", "--seconds", "1", "--temperature", "0.9", "--seed", "7"]


def test_quality_is_beside_real_clips_and_noise(place: Path, few: list[str], tmp_path: Path, capsys: Capsys) -> None:
    quality = figures_of(tmp_path / "e.json", "evaluate", place / "run", *few)["quality"]
    shown = capsys.readouterr().out
    assert "wavenet (3)" in shown and "real, held out (3)" in shown and "white noise (3)" in shown
    assert "clips of 1 s, samples at temperature 0.9 from seed 7" in shown and "to the rest: this is its bias" in shown
    assert (quality["num_reference"], quality["seconds"], quality["temperature"], quality["seed"]) == (8, 1, 0.9, 7)
    samples, real, noise = ({figure["name"]: figure for figure in one["figures"]} for one in quality["sets"])
    assert real["frames with pitch"]["value"] > 0.9 and noise["frames with pitch"]["value"] == 0
    assert real["Frechet distance"]["value"] < samples["Frechet distance"]["value"]
    figure = samples["mean level"]
    assert figure["low"] < figure["value"] < figure["high"]


def test_samples_are_those_of_the_command(place: Path, few: list[str], tmp_path: Path) -> None:
    config = measure.QualityConfig(quality=True, num=3, seconds=1, temperature=0.9, seed=7)
    drawn = measure.draw_samples(load(place / "run"), config)
    cli("sample", place / "run", "--out", tmp_path, *few[1:])
    for samples, path in zip(drawn, sorted(tmp_path.iterdir()), strict=True):
        np.testing.assert_allclose(samples, soundfile.read(path)[0], atol=2**-15)


def test_compare_shows_every_run(
    place: Path, few: list[str], tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_NUM_REFERENCE", 3)
    runs = [place / "run", copytree(place / "run", tmp_path / "run")]  # of one name
    entries = figures_of(tmp_path / "c.json", "compare", *runs, *few)
    assert f"wavenet ({runs[0]}) (3)" in capsys.readouterr().out
    assert [len(entry["quality"]["sets"]) for entry in entries] == [4, 4]
    # Of as many clips by chance as there are samples, at least as many others must be left.
    assert [entry["quality"]["num_reference"] for entry in entries] == [6, 6]


def test_samples_are_drawn_with_the_weights_that_are_scored(
    place: Path, few: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mean, draw_samples, seen = load(place / "run"), measure.draw_samples, []
    average_weights(mean, 2)

    def drawn(run: Any, config: measure.QualityConfig) -> list[np.ndarray]:
        torch.testing.assert_close(run.model.state_dict(), mean.model.state_dict(), rtol=0, atol=0)
        seen.append(run)
        return draw_samples(run, config)

    monkeypatch.setattr(measure, "draw_samples", drawn)
    for verb in ("evaluate", "compare"):
        cli(verb, place / "run", *few, "--average", 2)
    assert len(seen) == 2


def test_what_cannot_be_measured_is_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place / "run"
    assert "--seed is only for --quality" in mistake(["evaluate", run, "--seed", 7])
    assert "quality needs at least 3 samples" in mistake(["evaluate", run, "--quality", "--num", "2"])
    assert "give 1 to 60" in mistake(["evaluate", run, "--quality", "--seconds", "0.5"])
    assert "temperature" in mistake(["evaluate", run, "--quality", "--temperature", "-1"])
    assert "give another --split" in mistake(["evaluate", run, "--quality", "--split", "train"])
    monkeypatch.setattr(TokenDomain, "measure", None)  # refused before anything is scored
    for verb in ("evaluate", "compare"):
        line = mistake([verb, run, "--quality", "--seconds", "3"])
        assert "quality needs 32 real clips of 3 s, and a split of this data has 0" in line
