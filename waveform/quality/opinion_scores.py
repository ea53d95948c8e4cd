"""Predicted opinion scores of speech, from 1 to 5, by published networks: the extra `waveform[quality]`.

Distill-MOS (Stahl and Gamper 2025) and DNSMOS P.835's overall score (Reddy et al. 2022). Both packages contain their
weights; nothing is downloaded. They were trained on degraded speech, so they say little about what is not speech.
"""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec

import numpy as np
import torch

from waveform.audio.audio_format import WIDEBAND_HZ
from waveform.audio.resample import resample_blocks

_SHORTEST_S = 8  # for Distill-MOS: 2 s of white noise get 2.2, 8 s get 1.2, and so do the 2 s if they are repeated
Predict = Callable[[np.ndarray], float]  # of mono 16 kHz samples [n]


def predictors() -> dict[str, Predict]:
    """Name -> predictor, of those that are installed."""
    makers = {"distillmos": ("Distill-MOS", _distill_mos), "speechmos": ("DNSMOS", _dnsmos)}
    return {name: make() for package, (name, make) in makers.items() if find_spec(package) is not None}


def opinions_of(samples: np.ndarray, found: dict[str, Predict], *, sample_rate_hz: int) -> dict[str, float]:
    """Scores of mono samples [n] by each predictor."""
    if not found:
        return {}
    blocks = resample_blocks([samples.astype(np.float32)], from_hz=sample_rate_hz, to_hz=WIDEBAND_HZ)
    wideband = np.clip(np.concatenate(list(blocks)), -1, 1)
    return {name: predict(wideband) for name, predict in found.items()}


def _distill_mos() -> Predict:
    from distillmos import ConvTransformerSQAModel

    with redirect_stdout(io.StringIO()):  # it prints where its weights are
        model = ConvTransformerSQAModel().eval()

    def predict(samples: np.ndarray) -> float:
        repeated = np.resize(samples, max(len(samples), _SHORTEST_S * WIDEBAND_HZ))  # DNSMOS itself does so
        with torch.inference_mode():
            return float(model(torch.from_numpy(repeated)[None]))

    return predict


def _dnsmos() -> Predict:
    from speechmos import dnsmos

    return lambda samples: float(dnsmos.run(samples, sr=WIDEBAND_HZ)["ovrl_mos"])
