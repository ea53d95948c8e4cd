"""Pitch and loudness of mono 24 kHz audio, frame by frame: what `waveform/quality` compares samples and real clips by.

Pitch is the peak of the autocorrelation, each lag divided by that of the window (Boersma 1993). librosa's pYIN, which
is better at octaves, first compiles for 20 s.
"""

import numpy as np

from waveform.audio import SAMPLE_RATE_HZ

_FRAME = 960  # samples, 40 ms: two periods of the lowest pitch, nearly three
_HOP = 480  # samples, 20 ms
_LOWEST_HZ, _HIGHEST_HZ = 70.0, 500.0
_VOICED = 0.5  # of a frame's power that must repeat after a period
FLOOR_DB = -60.0  # a frame below it is silent, as in the report on a corpus
_LOWEST_DB = -80.0  # of digital silence, which has no level


def _frames(samples: np.ndarray) -> np.ndarray:
    """Overlapping frames [f, 960] of samples [n], n at least 960."""
    return np.lib.stride_tricks.sliding_window_view(np.asarray(samples, dtype=np.float64), _FRAME)[::_HOP]


def level_db(samples: np.ndarray) -> np.ndarray:
    """RMS of each frame [f] in dB below full scale, at least -80; a frame is 40 ms, the next begins 20 ms later."""
    power = np.square(_frames(samples)).mean(axis=1)
    return np.maximum(10 * np.log10(np.maximum(power, 1e-12)), _LOWEST_DB)


def pitch_hz(samples: np.ndarray) -> np.ndarray:
    """Pitch of each frame [f], of the frames of `level_db`; NaN if it is silent or has none from 70 to 500 Hz."""
    frames = _frames(samples)
    window = np.hanning(_FRAME + 2)[1:-1]
    shortest, longest = int(SAMPLE_RATE_HZ / _HIGHEST_HZ), int(SAMPLE_RATE_HZ / _LOWEST_HZ)
    shape = _autocorrelation(window[None])[:, : longest + 1]
    similar = _autocorrelation((frames - frames.mean(axis=1, keepdims=True)) * window)[:, : longest + 1] / shape
    similar /= np.maximum(similar[:, :1], 1e-12)
    lags = np.arange(shortest, longest + 1)
    # A period twice as long repeats as well: a small price on length prefers the shorter.
    best = lags[np.argmax(similar[:, shortest:] - 0.1 * lags / longest, axis=1)]
    strength = np.take_along_axis(similar, best[:, None], axis=1)[:, 0]
    voiced = (strength >= _VOICED) & (level_db(samples) >= FLOOR_DB)
    return np.where(voiced, SAMPLE_RATE_HZ / best, np.nan)


def _autocorrelation(frames: np.ndarray) -> np.ndarray:
    """Autocorrelation of each row [f, n], lags 0 to n - 1."""
    num = frames.shape[1]
    return np.fft.irfft(np.abs(np.fft.rfft(frames, 2 * num)) ** 2)[:, :num]
