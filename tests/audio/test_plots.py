"""Mel spectrograms and the demo's picture."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from waveform.audio.plots import mel_decibels, mel_image, save_demo_panel
from waveform.system.errors import UserError


def _sine(hz: float, *, amplitude: float = 1.0, num: int = 24_000) -> np.ndarray:
    return (amplitude * np.sin(2 * np.pi * hz * np.arange(num) / 24_000)).astype(np.float32)


@pytest.mark.parametrize("amplitude", [1.0, 0.01])
def test_a_sine_stands_at_its_level_and_pitch(amplitude: float) -> None:
    low, high = (mel_decibels(_sine(hz, amplitude=amplitude), sample_rate_hz=24_000) for hz in (500, 6000))
    middle = low.shape[1] // 2
    assert low.shape[0] == 80 and low[:, middle].argmax() < high[:, middle].argmax()
    assert high[:, middle].max() == pytest.approx(20 * np.log10(amplitude), abs=4)


@pytest.mark.slow  # librosa compiles for 13 s when it is first used
@pytest.mark.parametrize("num", [0, 1, 1024, 30_001])
def test_decibels_are_those_of_librosa(num: int) -> None:
    import librosa

    samples = (0.1 * np.random.default_rng(num).standard_normal(num)).astype(np.float32)
    padded = np.pad(samples, (0, max(0, 1024 - num)))
    power = librosa.feature.melspectrogram(y=padded, sr=24_000, n_fft=1024, hop_length=240, n_mels=80, norm=None)
    expected = librosa.power_to_db(power / 256**2, amin=1e-12, top_db=None)
    np.testing.assert_array_equal(mel_decibels(samples, sample_rate_hz=24_000), expected)


def test_the_image_has_high_frequencies_on_top() -> None:
    image = mel_image(_sine(8000, amplitude=0.5), sample_rate_hz=24_000)
    assert image.dtype == np.uint8 and image.shape[0] == 160 and image.shape[2] == 3 and image.flags["C_CONTIGUOUS"]
    brightness = image.astype(float).sum(axis=2).mean(axis=1)
    assert brightness.argmax() < 40
    assert mel_image(_sine(300), sample_rate_hz=24_000).astype(float).sum(axis=2).mean(axis=1).argmax() > 120


@pytest.mark.parametrize("num", [0, 1, 500, 1024])
def test_clips_shorter_than_a_frame(num: int) -> None:
    assert mel_image(np.zeros(num, dtype=np.float32), sample_rate_hz=24_000).shape[0] == 160


def test_the_panel_is_a_png_of_1600_pixels(tmp_path: Path) -> None:
    clips = {"real": _sine(440), "sample of größe": _sine(3000, num=12_000)}
    curves = {"wavenet": [(1.0, 5.5), (10.0, 3.0)], "empty": []}
    path = tmp_path / "new" / "panel.png"
    save_demo_panel(path, clips, curves, sample_rate_hz=24_000)
    picture = imread(path)
    assert picture.shape[1] == 1600 and picture.shape[0] > 600 and picture.std() > 0.05


def test_a_panel_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "panel.png").mkdir()
    with pytest.raises(UserError, match="a folder has that name"):
        save_demo_panel(tmp_path / "panel.png", {"real": _sine(440)}, {"a": [(0.0, 1.0)]}, sample_rate_hz=24_000)
