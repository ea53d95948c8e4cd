"""Predicted opinion scores of speech, from 1 to 5, by networks of others: the extra `waveform[quality]`.

Distill-MOS (Stahl and Gamper 2025) and DNSMOS P.835's overall score (Reddy et al. 2022). Both packages contain their
weights; nothing is fetched. They are trained on damaged speech: of what is not speech at all they only say little.
"""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec

import numpy as np
import torch
from scipy.signal import resample_poly

Predict = Callable[[np.ndarray], float]  # of mono 16 kHz samples [n]


def predictors() -> dict[str, Predict]:
    """Name -> predictor, of those that are installed."""
    makers = {"distillmos": ("Distill-MOS", _distill_mos), "speechmos": ("DNSMOS", _dnsmos)}
    return {name: make() for package, (name, make) in makers.items() if find_spec(package) is not None}


def opinions_of(samples: np.ndarray, found: dict[str, Predict]) -> dict[str, float]:
    """Scores of mono 24 kHz samples [n] by each predictor."""
    if not found:
        return {}
    at_16khz = np.clip(resample_poly(np.asarray(samples, dtype=np.float64), 2, 3), -1, 1).astype(np.float32)
    return {name: predict(at_16khz) for name, predict in found.items()}


def _distill_mos() -> Predict:
    from distillmos import ConvTransformerSQAModel

    with redirect_stdout(io.StringIO()):  # it says where its weights are
        model = ConvTransformerSQAModel().eval()

    def predict(samples: np.ndarray) -> float:
        with torch.inference_mode():
            return float(model(torch.from_numpy(samples)[None]))

    return predict


def _dnsmos() -> Predict:
    from speechmos import dnsmos

    return lambda samples: float(dnsmos.run(samples, sr=16_000)["ovrl_mos"])
