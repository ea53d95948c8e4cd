"""Pitch and loudness of mono audio, frame by frame: what `waveform/quality` compares samples and real clips by.

Pitch is the peak of the autocorrelation, each lag divided by that of the window (Boersma 1993). librosa's pYIN, which
is better at octaves, first compiles for 20 s.
"""

import numpy as np

_FRAME_S = 0.04  # two periods of the lowest pitch, nearly three
_HOP_S = 0.02
_LOWEST_HZ, _HIGHEST_HZ = 70.0, 500.0
_VOICED = 0.5  # of a frame's power that must repeat after a period
FLOOR_DB = -60.0  # a frame below it is silent, as in the report on a corpus
_LOWEST_DB = -80.0  # of digital silence, which has no level


def _frames(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """Overlapping frames of 40 ms [f, m] of samples [n], n at least m."""
    size, hop = round(_FRAME_S * sample_rate_hz), round(_HOP_S * sample_rate_hz)
    return np.lib.stride_tricks.sliding_window_view(np.asarray(samples, dtype=np.float64), size)[::hop]


def level_db(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """RMS of each frame [f] in dB below full scale, at least -80; a frame is 40 ms, the next begins 20 ms later."""
    power = np.square(_frames(samples, sample_rate_hz=sample_rate_hz)).mean(axis=1)
    return np.maximum(10 * np.log10(np.maximum(power, 1e-12)), _LOWEST_DB)


def pitch_hz(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """Pitch of each frame [f], of the frames of `level_db`; NaN if it is silent or has none from 70 to 500 Hz."""
    frames = _frames(samples, sample_rate_hz=sample_rate_hz)
    window = np.hanning(frames.shape[1] + 2)[1:-1]
    shortest, longest = int(sample_rate_hz / _HIGHEST_HZ), int(sample_rate_hz / _LOWEST_HZ)
    shape = _autocorrelation(window[None])[:, : longest + 1]
    similar = _autocorrelation((frames - frames.mean(axis=1, keepdims=True)) * window)[:, : longest + 1] / shape
    similar /= np.maximum(similar[:, :1], 1e-12)
    lags = np.arange(shortest, longest + 1)
    # A period twice as long repeats as well: a small price on length prefers the shorter.
    best = lags[np.argmax(similar[:, shortest:] - 0.1 * lags / longest, axis=1)]
    strength = np.take_along_axis(similar, best[:, None], axis=1)[:, 0]
    voiced = (strength >= _VOICED) & (level_db(samples, sample_rate_hz=sample_rate_hz) >= FLOOR_DB)
    return np.where(voiced, sample_rate_hz / best, np.nan)


def _autocorrelation(frames: np.ndarray) -> np.ndarray:
    """Autocorrelation of each row [f, n], lags 0 to n - 1."""
    num = frames.shape[1]
    return np.fft.irfft(np.abs(np.fft.rfft(frames, 2 * num)) ** 2)[:, :num]
