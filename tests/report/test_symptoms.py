"""What a page says of runs on speech that something is wrong with."""

import numpy as np
import pytest

from waveform.speech.report import ALONE, _symptoms

_RATE_HZ = 16_000
_LOUD = 0.1 * np.random.default_rng(0).standard_normal(2 * _RATE_HZ)


@pytest.mark.parametrize(
    ("nats", "drawn", "symptom"),
    [
        (1.5, _LOUD, None),
        (
            1.5,
            np.concatenate([_LOUD[:_RATE_HZ], np.zeros(2 * _RATE_HZ)]),
            "ct falls silent in 66% of what it draws: raise",
        ),
        (1.5, np.sign(_LOUD), "ct clips in 100% of what it draws: lower its temperature"),
        (1.5, np.zeros(100), None),  # too short to tell
        (1.8, _LOUD, "ct knows no more than linear prediction alone (1.800 and 1.800 nats), so expect noise: "),
        (0.9, _LOUD, "The NLL of ct is below 1 nat"),
    ],
)
def test_what_is_wrong_is_said_with_what_helps(nats: float, drawn: np.ndarray, symptom: str | None) -> None:
    entry = {"nats_per_token": nats, "linear_prediction_nats_per_token": 1.8}
    found = _symptoms([entry], ["ct"], {"ct": drawn, ALONE: np.zeros(2 * _RATE_HZ)}, rate=_RATE_HZ)
    assert len(found) == (symptom is not None)
    assert symptom is None or found[0].startswith(symptom)
