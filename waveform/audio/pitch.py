"""Pitch and loudness of mono audio, frame by frame, by which `waveform/quality` compares samples with real clips."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import librosa
import numpy as np

from waveform.system.locks import locked

_FRAME_S = 0.04
_PITCH_FRAME_S = 0.08
_VOICED = 0.1  # least probability; pYIN gives white noise 0.01, and nevertheless a pitch to a tenth of its frames
_HOP_S = 0.02
_LOWEST_HZ, _HIGHEST_HZ = 70.0, 500.0
FLOOR_DB = -60.0  # a frame below it is silent, as in the report on a corpus
_LOWEST_DB = -80.0  # of digital silence, which has no level


def _frame_level_db(samples: np.ndarray, *, size: int, hop: int) -> np.ndarray:
    """RMS in dB below full scale, at least -80, of frames [f] of `size` samples, `hop` apart."""
    frames = np.lib.stride_tricks.sliding_window_view(np.asarray(samples, dtype=np.float64), size)[::hop]
    power = np.square(frames).mean(axis=1)
    return np.maximum(10 * np.log10(np.maximum(power, 1e-12)), _LOWEST_DB)


def level_db(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """RMS of each frame [f] in dB below full scale, at least -80; a frame is 40 ms, the next begins 20 ms later."""
    return _frame_level_db(samples, size=round(_FRAME_S * sample_rate_hz), hop=round(_HOP_S * sample_rate_hz))


def pitch_hz(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """Pitch of each frame [g] by pYIN (Mauch and Dixon 2014); NaN if it is silent or has none from 70 to 500 Hz.

    A frame is 80 ms, the next begins 20 ms later. The first call on a machine compiles librosa's code for some seconds.
    """
    size, hop = round(_PITCH_FRAME_S * sample_rate_hz), round(_HOP_S * sample_rate_hz)
    loud = _frame_level_db(samples, size=size, hop=hop) >= FLOOR_DB
    if not loud.any():
        return np.full(len(loud), np.nan)
    pitch, _, probability = _pyin()(
        np.asarray(samples, dtype=np.float64), sr=sample_rate_hz, frame_length=size, hop_length=hop
    )
    return np.where(loud & (probability >= _VOICED), pitch, np.nan)


@cache
def _pyin() -> Callable[..., Any]:
    """librosa's pYIN, compiled.

    numba caches its code on disk, and two processes that write there at once corrupt it: every later process that reads
    it crashes. So processes compile it, or read it, one after another.
    """
    refusal = "another process has been compiling librosa's code for ten minutes; end it, or wait"
    with locked(Path(librosa.__file__).parent, refusal=refusal, patience_s=600):
        pyin = partial(librosa.pyin, fmin=_LOWEST_HZ, fmax=_HIGHEST_HZ, center=False)  # imports, compiles
        pyin(np.zeros(4096), frame_length=2048)
    return pyin
