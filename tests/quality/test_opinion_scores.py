"""Predicted opinion scores, if the extra `quality` is installed: real speech far above white noise, clips of 2 s."""

import numpy as np
import pytest

from waveform.audio.demo_speech import demo_speech_dir
from waveform.audio.files import read_audio
from waveform.quality.opinion_scores import opinions_of, predictors

RATE_HZ = 24_000


@pytest.mark.parametrize(("package", "name"), [("distillmos", "Distill-MOS"), ("speechmos", "DNSMOS")])
def test_short_clips_of_speech_score_far_above_noise(package: str, name: str) -> None:
    pytest.importorskip(package)
    found = {name: predictors()[name]}
    recording = sorted((demo_speech_dir() / "test").iterdir())[0]
    speech = read_audio(recording, sample_rate_hz=RATE_HZ)[: 2 * RATE_HZ]
    noise = 0.1 * np.random.default_rng(0).standard_normal(2 * RATE_HZ)
    high, low = (opinions_of(samples, found, sample_rate_hz=RATE_HZ)[name] for samples in (speech, noise))
    assert low < 1.4 and high > low + 1


def test_without_the_extra_there_are_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waveform.quality.opinion_scores.find_spec", lambda package: None)
    assert predictors() == {} and opinions_of(np.zeros(RATE_HZ), predictors(), sample_rate_hz=RATE_HZ) == {}
