"""Rate, quantiser and scale of a data set: what they do, that all follows them, and that one module knows the rate."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from pytest import MonkeyPatch

import waveform
from tests.audio.conftest import write_audio
from tests.calling import cli, mistake, printed
from waveform.audio.audio_format import AudioFormat, differences, format_of
from waveform.engine.dataset import read_dataset
from waveform.runs.folder import read_config
from waveform.speech import domain as verb
from waveform.speech.report import SoundContents
from waveform.system.errors import UserError

FORMAT = AudioFormat(16_000, "linear", "clip")
SETTINGS = ["data.sample_rate_hz=16000", "data.quantiser=linear", "data.normalise=clip"]
SMALL = ["preset=demo", "model=wavenet", "train.device=cpu", "train.max_seconds=null", "train.max_steps=3"]


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Audio of two rates, a data set of 16 kHz linear samples and a run on it, and both in the default format."""
    place = tmp_path_factory.mktemp("formats")
    for i, split in enumerate(("train", "valid", "test")):
        for rate in (16_000, 44_100):
            write_audio(place / "audio" / split / f"{rate}.wav", seed=i, sample_rate_hz=rate, duration_s=0.2)
    cli("prepare", place / "audio", place / "data", *SETTINGS)
    (place / "printed.txt").write_text(printed("train", place / "data", place / "run", *SMALL))
    cli("prepare", place / "audio", place / "other data")
    cli("train", place / "other data", place / "other run", *SMALL)
    return place


def test_a_data_set_keeps_its_format(place: Path) -> None:
    data = read_dataset(place / "data")
    assert format_of(data.modality) == FORMAT
    assert json.loads((place / "data" / "report.json").read_text())["sample_rate_hz"] == 16_000
    tokens = data.open_split("train")
    assert tokens.lengths == [3200, 3200]
    samples, _ = soundfile.read(place / "audio" / "train" / "16000.wav", dtype="float32")
    expected = np.floor((samples - samples.min()) / (samples.max() - samples.min()) * 255 + 0.5)
    read = tokens.read(tokens.names.index("train/16000.wav"), start=0, stop=3200)
    assert np.abs(read.astype(float) - expected).max() <= 1 and read.min() == 0 and read.max() == 255


def test_samples_nll_and_speeds_follow_it(place: Path, tmp_path: Path) -> None:
    cli("sample", place / "run", "--out", tmp_path, "--seconds", "0.01")
    written = soundfile.info(next(tmp_path.glob("*.wav")))
    assert (written.samplerate, written.frames) == (16_000, 160)
    run = waveform.load(place / "run")
    assert run.audio_format == FORMAT and run.unit_s == 1 / 16_000
    assert run.sample(seconds=0.01).shape == (1, 160)
    nats = run.nll(np.sin(np.arange(4_410) / 20), sample_rate_hz=44_100.0)
    assert len(nats) == 1_600 and np.isfinite(nats).all()
    quiet = run.nll(0.1 * np.sin(np.arange(4_410) / 20), sample_rate_hz=44_100)  # scaled by its own range
    np.testing.assert_allclose(nats, quiet, atol=0.3)
    tensor = (torch.arange(1_600) / 20).sin().bfloat16()  # which numpy does not have
    expected = run.nll(tensor.float(), sample_rate_hz=16_000)
    for made in (tensor, tensor.float().requires_grad_()):
        np.testing.assert_array_equal(run.nll(made, sample_rate_hz=16_000), expected)
        assert run.sample(seconds=0.01, prime=made).shape == (1, 160)


@pytest.mark.parametrize("rate", [0, -5, 16_000.5, float("inf"), float("nan")])
def test_a_rate_that_is_not_a_whole_number(rate: Any, place: Path) -> None:
    with pytest.raises(UserError, match="give a whole number of at least 1"):
        waveform.load(place / "run").nll(np.zeros(9), sample_rate_hz=rate)


@pytest.mark.parametrize(
    ("audio", "says"),
    [
        (np.ones(9, dtype=np.int16), r"audio of type int16; give floats in \[-1, 1\]"),
        (np.full(9, np.nan), "not finite"),
        (np.full(9, 1e300), "not finite"),  # in fp32
        (np.zeros((9, 2)), "give mono samples"),
        (np.zeros(0), "give mono samples"),
    ],
)
def test_what_is_no_sound_is_refused(audio: np.ndarray, says: str, place: Path) -> None:
    run = waveform.load(place / "run")
    for use in (lambda: run.nll(audio, sample_rate_hz=16_000), lambda: run.sample(seconds=0.01, prime=audio)):
        with pytest.raises(UserError, match=says):
            use()


@pytest.mark.parametrize("labels", [[None], "ab"])
def test_a_label_for_each_sample(labels: Any, place: Path) -> None:
    with pytest.raises(UserError, match="give a list of 2, one for each sample"):
        waveform.load(place / "run").sample(num=2, seconds=0.01, labels=labels)


@pytest.mark.parametrize("verb", ["evaluate", "compare"])
def test_figures_that_look_ahead_say_so(verb: str, place: Path) -> None:
    for run, looks_ahead in (("run", True), ("other run", False)):
        assert ("each clip scaled by its own range, which looks ahead" in printed(verb, place / run)) == looks_ahead


def test_a_report_shows_the_format_of_the_data(place: Path) -> None:
    """A run on a data set has the defaults in its own settings of `data`."""
    shown = SoundContents().settings(waveform.load(place / "run"))
    assert format_of(shown["dataset"]["modality"]) == FORMAT
    assert {f"data.{name}={value}" for name, value in shown["data"].items()} >= {*SETTINGS}


def test_training_says_its_receptive_field_in_time(place: Path) -> None:
    assert "receptive field: 2,045 samples = 127.8 ms" in (place / "printed.txt").read_text()


def test_what_differs_is_refused(place: Path, tmp_path: Path) -> None:
    line = mistake(["prepare", place / "audio", place / "data"])
    assert "data.sample_rate_hz was 16000 and is 24000, data.quantiser was linear and is mu_law" in line
    line = mistake(["train", place / "data", tmp_path / "run", *SMALL, "data.sample_rate_hz=24000"])
    assert "data.sample_rate_hz was 16000 and is 24000" in line and "leave the setting out" in line
    line = mistake(["compare", place / "run", place / "other run"])
    assert "read different tokens" in line and "data.quantiser was linear and is mu_law" in line
    assert "data.normalise was clip and is none" in mistake(["evaluate", place / "run", "--data", place / "other data"])


def test_a_run_of_before_a_setting_existed_is_resumed(place: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A run folder of when `data` had fewer settings; what it was trained on says its data set."""
    train, compose = ["train", place / "audio", tmp_path / "run", *SMALL], verb.compose_config

    def without_the_scale(*arguments: Any, **options: Any) -> dict[str, Any]:
        config = compose(*arguments, **options)
        del config["data"]["normalise"]
        return config

    with monkeypatch.context() as patched:
        patched.setattr(verb, "compose_config", without_the_scale)
        cli(*train)
    assert "normalise" not in read_config(tmp_path / "run")["data"]
    assert "began with other data: data.normalise was none and is clip" in mistake([*train, "data.normalise=clip"])
    assert 'data.quantiser (was "mu_law", is "linear")' in mistake([*train, "data.quantiser=linear"])
    cli(*train, "train.max_steps=4")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.sample_rate_hz=16", "data.sample_rate_hz is 16; it must be from 1,000 to 192,000"),
        ("data.sample_rate_hz=16kHz", "data.sample_rate_hz=16kHz: give a whole number"),
        ("data.sample_rate_hz=null", "data.sample_rate_hz=null: give a value that is not null"),
        ("data.labels=", "(Is a directory); give folder"),
        ("data.quantiser=cubic", "data.quantiser is 'cubic'; choose mu_law, linear, mu_law_floor or linear_floor"),
        ("data.normalise=all", "data.normalise is 'all'; choose none or clip"),
        ("data.drop_rest=true", "data.piece_samples is None: recordings are not cut, and nothing remains; set data"),
    ],
)
def test_values_that_do_not_exist(setting: str, said: str, place: Path, tmp_path: Path) -> None:
    assert said in mistake(["prepare", place / "audio", tmp_path / "data", setting])


@pytest.mark.parametrize("quantiser", ["mu_law", "linear", "mu_law_floor", "linear_floor"])
def test_every_class_comes_back(quantiser: str) -> None:
    classes = np.arange(256)
    audio_format = AudioFormat(quantiser=quantiser)
    assert audio_format.encode(audio_format.decode(classes)).tolist() == classes.tolist()
    assert audio_format.encode(np.array([-2.0, 0.0, 2.0])).tolist() == [0, 128, 255]


@pytest.mark.parametrize("quantiser", ["mu_law_floor", "linear_floor"])
def test_the_truncating_quantisers_are_those_of_published_figures(quantiser: str) -> None:
    """Compared with the published formula in fp64, on values that lie between the boundaries of classes."""
    samples = (np.random.default_rng(0).uniform(-1, 1, 200_000) ** 3).astype(np.float32)
    exact = samples.astype(np.float64)
    if quantiser == "mu_law_floor":
        exact = np.sign(exact) * np.log1p(255 * np.abs(exact)) / np.log1p(255)
    steps = (exact + 1) / 2 * (256 - 0.01) + 0.005
    expected = np.floor(steps)
    found = AudioFormat(quantiser=quantiser).encode(samples)
    near_a_boundary = np.abs(steps - np.rint(steps)) < 1e-4
    assert (found == expected)[~near_a_boundary].all() and near_a_boundary.mean() < 0.01
    assert (found != AudioFormat(quantiser=quantiser.removesuffix("_floor")).encode(samples)).mean() > 0.1
    decoded = AudioFormat(quantiser=quantiser).decode(np.arange(256))
    assert (np.diff(decoded) > 0).all() and np.abs(decoded).max() < 1


def test_scale() -> None:
    np.testing.assert_allclose(FORMAT.scale(np.array([1.0, 2.0, 4.0], dtype=np.float32)), [-1, -1 / 3, 1], rtol=1e-6)
    for flat in (np.ones(3, dtype=np.float32), np.array([0, 1e-40, 0], dtype=np.float32)):
        assert FORMAT.scale(flat).tolist() == [0, 0, 0]
    assert len(FORMAT.scale(np.zeros(0))) == 0
    assert AudioFormat().scale(np.ones(3, dtype=np.float32)).tolist() == [1, 1, 1]


def test_modality_and_back() -> None:
    for audio_format in (AudioFormat(), FORMAT, AudioFormat(48_000), AudioFormat(quantiser="mu_law_floor")):
        assert format_of(audio_format.modality()) == audio_format
    assert "normalise" not in AudioFormat().modality()  # data sets of earlier versions stay equal
    assert differences(AudioFormat().settings, AudioFormat().settings) == ""
    for unknown in ("cubic", "mu_law", ["mu-law"]):
        with pytest.raises(UserError, match="comes from a newer version of waveform; update waveform"):
            format_of({"sample_rate_hz": 24_000, "quantiser": unknown})


# Not 8,000, the usual port of a web server.
_RATES_HZ = {11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000, 176_400, 192_000}
_RATE_IN_TEXT = re.compile(rf"\d ?k?Hz\b|\b(?:{'|'.join(f'{rate}|{rate:_}|{rate:,}' for rate in sorted(_RATES_HZ))})\b")


def _constants(code: CodeType) -> Iterator[object]:
    """Those of compiled code, with what Python computes of them, such as 24 * 1000."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, tuple | frozenset):
            yield from constant
        else:
            yield constant


def test_one_module_knows_rates() -> None:
    """Numbers that are rates of audio stand in audio_format alone; comments and docstrings may name them."""
    root = Path(waveform.__file__).parent.parent
    found: list[Any] = []
    paths = [path for package in ("waveform", "baselines") for path in (root / package).rglob("*.py")]
    for path in (path for path in paths if path.name != "audio_format.py"):
        code = compile(path.read_text(encoding="utf-8"), path, "exec", optimize=2)  # without docstrings
        for constant in _constants(code):
            is_rate = isinstance(constant, int | float) and constant in _RATES_HZ
            if is_rate or (isinstance(constant, str) and _RATE_IN_TEXT.search(constant)):
                found.append((path.relative_to(root), constant))
    assert not found
