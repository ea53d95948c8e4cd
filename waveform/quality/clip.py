"""What is heard in one clip, in numbers: spectrum, pitch, level, clipping and how it ends; the input of all figures."""

from dataclasses import dataclass, field

import numpy as np

from waveform.audio.decoding_child import CLIPPED_AMPLITUDE
from waveform.audio.pitch import FLOOR_DB, level_db, pitch_hz
from waveform.audio.plots import mel_decibels

_BANDS = 20  # of which each is four of the mel spectrogram's
_LOWEST_DB = -90.0  # below 16 bits, silence has no spectrum
_END_FRAMES = 24  # of 40 ms, of which one begins every 20 ms: the last half second
_REFERENCE_HZ = 100.0  # 0 semitones


@dataclass(frozen=True)
class Clip:
    """What was measured in one clip."""

    pieces: np.ndarray  # [p, 40] of each second: mean and standard deviation over time of 20 mel bands, dB
    semitones: np.ndarray  # [v] pitch of the frames that have one, above 100 Hz
    voiced: float  # share of the frames that have a pitch
    level_db: np.ndarray  # [f]
    clipped: float  # share of the samples
    ends_silent: bool  # its last half second is below -60 dBFS throughout
    ends_noisy: bool  # its last half second is not silent, and no frame of it has a pitch
    opinions: dict[str, float] = field(default_factory=dict)  # predicted opinion scores, 1 to 5

    @property
    def silent(self) -> float:
        """Share of the frames below -60 dBFS."""
        return float((self.level_db < FLOOR_DB).mean())


def measure_clip(samples: np.ndarray, *, sample_rate_hz: int, opinions: dict[str, float] | None = None) -> Clip:
    """Measure mono samples [n], at least a second of them; what is left of a second at the end has no piece."""
    rate = sample_rate_hz
    pitches, levels = pitch_hz(samples, sample_rate_hz=rate), level_db(samples, sample_rate_hz=rate)
    has_pitch = ~np.isnan(pitches)
    ends_silent = bool((levels[-_END_FRAMES:] < FLOOR_DB).all())
    seconds = samples[: len(samples) // rate * rate].reshape(-1, rate)
    return Clip(
        pieces=np.stack([_spectral_statistics(second, sample_rate_hz=rate) for second in seconds]),
        semitones=12 * np.log2(pitches[has_pitch] / _REFERENCE_HZ),
        voiced=float(has_pitch.mean()),
        level_db=levels,
        clipped=float((np.abs(samples) >= CLIPPED_AMPLITUDE).mean()),
        ends_silent=ends_silent,
        ends_noisy=not ends_silent and not has_pitch[-_END_FRAMES:].any(),
        opinions=opinions or {},
    )


def _spectral_statistics(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """Mean and standard deviation over time of 20 log-mel bands [40]."""
    mel = np.maximum(mel_decibels(samples, sample_rate_hz=sample_rate_hz), _LOWEST_DB)
    bands = mel.reshape(_BANDS, -1, mel.shape[1]).mean(axis=1)
    return np.concatenate([bands.mean(axis=1), bands.std(axis=1)])
