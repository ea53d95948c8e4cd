"""Figures of quality: pitch, level, Frechet distance and intervals against what they must be for made-up audio."""

from pathlib import Path
from threading import Thread

import librosa
import numpy as np
import pytest
from scipy import stats

from waveform.audio import pitch
from waveform.audio.pitch import level_db, pitch_hz
from waveform.quality.clip import Clip, measure_clip
from waveform.quality.figures import figures_of, frechet_by_chance, frechet_distance, jackknife
from waveform.system.locks import locked

RATE_HZ = 24_000


def voice(pitch: float, *, seconds: float = 2.0, seed: int = 0) -> np.ndarray:
    """Harmonics that fall off as those of a voice do, swelling twice a second, in a little noise."""
    time_s = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    harmonics = sum(np.sin(2 * np.pi * k * pitch * time_s + k * k) / k for k in range(1, 12))
    noise = np.random.default_rng(seed).standard_normal(len(time_s))
    return (0.1 * harmonics * (1.2 + np.sin(4 * np.pi * time_s + seed)) + 0.001 * noise).astype(np.float32)


def clip_of(samples: np.ndarray, **opinions: float) -> Clip:
    return measure_clip(samples, sample_rate_hz=RATE_HZ, opinions=opinions)


@pytest.fixture(scope="module")
def reference() -> list[Clip]:
    """Voices of 180 to 219 Hz."""
    return [clip_of(voice(180 + i, seconds=1, seed=i)) for i in range(40)]


def noise(seed: int = 0, *, seconds: float = 2.0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(round(seconds * RATE_HZ))).astype(np.float32)


@pytest.mark.parametrize("pitch", [90, 117, 200, 333, 480])
def test_pitch_of_a_voice(pitch: float) -> None:
    found = pitch_hz(voice(pitch), sample_rate_hz=RATE_HZ)
    assert len(found) == 97  # frames of 80 ms, 20 ms apart, in two seconds
    has_pitch = ~np.isnan(found)
    assert has_pitch.mean() > 0.95  # where it is faint, some frame may have none
    np.testing.assert_allclose(found[has_pitch], pitch, rtol=0.01)


def test_noise_and_silence_have_no_pitch() -> None:
    assert np.isnan(pitch_hz(noise(), sample_rate_hz=RATE_HZ)).all()
    assert np.isnan(pitch_hz(np.zeros(RATE_HZ), sample_rate_hz=RATE_HZ)).all()
    assert np.isnan(pitch_hz(1e-4 * voice(200), sample_rate_hz=RATE_HZ)).all()


def test_one_process_at_a_time_compiles_librosa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once left code on disk that ended every later process by a signal."""
    calls: list[object] = []
    monkeypatch.setattr(librosa, "pyin", lambda samples, **options: calls.append(options))
    compiling = Thread(target=pitch._pyin.__wrapped__)
    with locked(Path(librosa.__file__).parent, refusal="other tests compile it", patience_s=200):
        compiling.start()
        compiling.join(0.2)
        assert not calls
    compiling.join(200)
    assert len(calls) == 1


def test_level_is_that_below_full_scale() -> None:
    np.testing.assert_allclose(level_db(np.full(RATE_HZ, 0.1), sample_rate_hz=RATE_HZ), -20)
    np.testing.assert_array_equal(level_db(np.zeros(RATE_HZ), sample_rate_hz=RATE_HZ), -80)


def test_a_clip_that_fades_ends_in_silence_and_one_that_hisses_in_noise() -> None:
    speech, silence, hiss = voice(200), np.zeros(RATE_HZ // 2, dtype=np.float32), noise(seconds=0.6)
    for parts, ends in (([], (False, False)), ([silence], (True, False)), ([hiss], (False, True))):
        clip = clip_of(np.concatenate([speech, *parts]))
        assert (clip.shares["ends in silence"], clip.shares["ends in noise"]) == ends
    clip = clip_of(np.concatenate([speech, silence, np.ones(RATE_HZ // 4, dtype=np.float32)]))
    assert clip.shares["clipped samples"] == pytest.approx(0.25 / 2.75) and 0.1 < clip.shares["silent frames"] < 0.25
    assert clip.shares["frames with pitch"] > 0.7 and clip.pieces.shape == (2, 40)


def test_frechet_distance_of_gaussians() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((200_000, 3)) * [1, 2, 3]
    b = rng.standard_normal((200_000, 3)) * [2, 2, 1] + [0, 1, 2]
    assert frechet_distance(a, b) == pytest.approx((1 + 4) + (1 + 0 + 4), rel=0.01)
    assert frechet_distance(a, a[::-1]) == pytest.approx(0, abs=1e-6)


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    clips = [clip_of(voice(150 + 20 * i, seconds=1)) for i in range(5)]

    def mean(some: list[Clip]) -> float:
        return float(np.mean([clip.semitones[0] for clip in some]))

    figure = jackknife("mean", "semitones", clips, mean)
    values = [clip.semitones[0] for clip in clips]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (figure.low, figure.high) == pytest.approx((low, high))


def test_intervals_stay_where_a_figure_can_be() -> None:
    """Two clips that have nothing in common: every interval is as wide as it can be."""
    loud, quiet = voice(400), 1e-3 * noise(1)
    loud[: len(loud) // 2] = 0
    figures = figures_of([clip_of(loud, MOS=1.5), clip_of(quiet, MOS=2.5)], [clip_of(voice(150))] * 2)
    wide = [figure for figure in figures if figure.low != figure.high]
    assert len(wide) > 5
    for figure in wide:
        assert figure.low == {"1 to 5": 1, "dBFS": figure.low}.get(figure.unit, 0), figure
        assert figure.high == {"share": 1, "1 to 5": 5}.get(figure.unit, figure.high), figure
    assert {"share", "1 to 5", "dBFS", "dB^2"} <= {figure.unit for figure in wide}


def test_figures_lie_between_noise_and_real(reference: list[Clip]) -> None:
    voices = ([voice(hz + i, seconds=1, seed=seed + i) for i in range(8)] for hz, seed in ((184.5, 100), (300, 200)))
    real, other, hiss = (
        {figure.name: figure for figure in figures_of(list(map(clip_of, sounds)), reference)}
        for sounds in (*voices, [noise(i, seconds=1) for i in range(8)])
    )
    chance = frechet_by_chance(reference, num=8, seed=0)
    distances = [figures["Frechet distance"].value or 0 for figures in (real, other, hiss)]
    assert distances[0] < distances[1] < distances[2]
    assert chance.low is not None and chance.high is not None and chance.value is not None
    assert 0 < chance.low < chance.value < chance.high and distances[2] > 10 * chance.high
    assert real["mean pitch"].value == pytest.approx(188, rel=0.02) and hiss["mean pitch"].value is None
    assert other["pitch, distance"].value == pytest.approx(12 * np.log2(303.5 / 199), abs=0.5)
    assert hiss["pitch, distance"].value is None and hiss["pitch, distance"].low is None
    assert hiss["ends in noise"].value == 1 and real["ends in noise"].value == 0


def test_fewer_clips_are_further_away_by_chance(reference: list[Clip]) -> None:
    """The bias that the report prints: equal sets seem to differ, the more the smaller they are."""
    few, many = (frechet_by_chance(reference, num=num, seed=0).value or 0 for num in (3, 16))
    assert few > 1.5 * many > 0
