"""What a notebook shows: sounds to play, and the log of a run as a data frame."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from waveform.audio.audio_format import AudioFormat
from waveform.engine.metrics import read_metrics
from waveform.runs.named import find_run
from waveform.speech.report import player
from waveform.speech.run import finite_floats
from waveform.system.errors import UserError

if TYPE_CHECKING:
    import pandas

_PIXELS_PER_S = 150
_LOWEST_HZ, _HIGHEST_HZ = 100, 655_350  # a spectrogram has 100 columns a second; FLAC's highest rate


@dataclass(frozen=True)
class Sounds:
    """Sounds that a notebook plays, each below its mel spectrogram."""

    samples: np.ndarray  # [num, n], fp32 in [-1, 1]
    sample_rate_hz: int

    def _repr_html_(self) -> str:
        players = [player("", sound, self.sample_rate_hz) for sound in self.samples]
        return "".join(
            f'<div><img src="{one.picture}" style="width:100%;max-width:{_PIXELS_PER_S * one.duration_s:.0f}px;'
            f'height:80px"><br><audio controls src="{one.audio}"></audio></div>'
            for one in players
        )


def listen(samples: np.ndarray | Tensor, *, sample_rate_hz: int = AudioFormat.sample_rate_hz) -> Sounds:
    """Players of one sound [n] or of several [num, n], floats in [-1, 1], which a notebook's cell shows as its value.

    Raises UserError for other shapes, integers, values that are not finite, and a rate that is not a whole number from
    100 to 655,350.
    """
    sounds = np.atleast_2d(finite_floats(samples))
    if sounds.ndim != 2 or not sounds.size:
        raise UserError(f"samples have the shape {np.shape(samples)}; give [n] or [num, n], n at least 1")
    if sample_rate_hz not in range(_LOWEST_HZ, _HIGHEST_HZ + 1):
        raise UserError(f"sample_rate_hz is {sample_rate_hz}; give a whole number from {_LOWEST_HZ} to {_HIGHEST_HZ}")
    return Sounds(sounds, int(sample_rate_hz))


def metrics(run_dir: Path | str) -> "pandas.DataFrame":
    """Read the log of a run: a row for each record, whose `kind` is train or evaluate, with NLL in nats per token.

    Raises UserError if there is no run, if its log cannot be read, or if pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise UserError('metrics needs pandas: pip install "waveform[notebook]"') from error
    return pandas.DataFrame(read_metrics(find_run(run_dir)))
