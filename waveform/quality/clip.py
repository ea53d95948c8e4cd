"""What is heard in one clip, in numbers: spectrum, pitch, level, clipping and how it ends; the input of all figures."""

from dataclasses import dataclass

import numpy as np

from waveform.audio.decoding_child import CLIPPED_AMPLITUDE
from waveform.audio.pitch import FLOOR_DB, level_db, pitch_hz
from waveform.audio.plots import mel_decibels

_BANDS = 20  # each the mean of four bands of the mel spectrogram
_LOWEST_DB = -90.0  # below 16 bits, silence has no spectrum
_END_FRAMES = 24  # of 40 ms, of which one begins every 20 ms: the last half second
REFERENCE_HZ = 100.0  # 0 semitones


@dataclass(frozen=True)
class Clip:
    """What was measured in one clip."""

    pieces: np.ndarray  # [p, 40] of each second: mean and standard deviation over time of 20 mel bands, dB
    semitones: np.ndarray  # [v] pitch of the frames that have one, above 100 Hz
    level_db: np.ndarray  # [f]
    shares: dict[str, float]  # of its frames, of its samples, and 0 or 1 for how it ends
    opinions: dict[str, float]  # predicted scores, 1 to 5


def measure_clip(samples: np.ndarray, *, sample_rate_hz: int, opinions: dict[str, float] | None = None) -> Clip:
    """Measure mono samples [n], at least a second of them; an incomplete second at the end has no piece."""
    rate = sample_rate_hz
    pitches, levels = pitch_hz(samples, sample_rate_hz=rate), level_db(samples, sample_rate_hz=rate)
    has_pitch, is_silent = ~np.isnan(pitches), levels < FLOOR_DB
    ends_silent = is_silent[-_END_FRAMES:].all()
    seconds = samples[: len(samples) // rate * rate].reshape(-1, rate)
    return Clip(
        pieces=np.stack([_spectral_statistics(second, sample_rate_hz=rate) for second in seconds]),
        semitones=12 * np.log2(pitches[has_pitch] / REFERENCE_HZ),
        level_db=levels,
        shares={
            "frames with pitch": float(has_pitch.mean()),
            "silent frames": float(is_silent.mean()),
            "clipped samples": float((np.abs(samples) >= CLIPPED_AMPLITUDE).mean()),
            "ends in silence": float(ends_silent),
            "ends in noise": float(not ends_silent and not has_pitch[-_END_FRAMES:].any()),
        },
        opinions=opinions or {},
    )


def _spectral_statistics(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """Mean and standard deviation over time of 20 log-mel bands [40]."""
    mel = np.maximum(mel_decibels(samples, sample_rate_hz=sample_rate_hz), _LOWEST_DB)
    bands = mel.reshape(_BANDS, -1, mel.shape[1]).mean(axis=1)
    return np.concatenate([bands.mean(axis=1), bands.std(axis=1)])
