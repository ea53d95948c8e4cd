"""What the classes of each quantiser mean as amplitudes: values and the bounds between them.

Here, not with the code that quantises audio, because models that predict amplitudes need it as well.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

NUM_CLASSES = 256
_MU = NUM_CLASSES - 1
_EPSILON = 0.01  # keeps 1 in the last class of a floor quantiser
SCALE, OFFSET = NUM_CLASSES - _EPSILON, _EPSILON / 2


class SoundClasses(NamedTuple):
    """The classes of a quantiser in the order of their amplitudes."""

    values: tuple[float, ...]  # [V] in -1..1
    bounds: tuple[float, ...]  # [V - 1] between neighbours

    @property
    def widths(self) -> np.ndarray:
        """[V]; the outermost classes end as far from their value as they begin."""
        first, last = 2 * self.values[0] - self.bounds[0], 2 * self.values[-1] - self.bounds[-1]
        return np.diff([first, *self.bounds, last])


def nearest_bounds() -> np.ndarray:
    """Where classes 1 to 255 begin if a value in -1..1 is rounded to the nearest of 256, [255] fp64."""
    return (2 * np.arange(1, NUM_CLASSES) - 1) / _MU - 1


def nearest_values() -> np.ndarray:
    """The 256 values, [256] fp64."""
    return 2 * np.arange(NUM_CLASSES) / _MU - 1


def floor_bounds() -> np.ndarray:
    """Where classes 1 to 255 begin if values are rounded down, [255] fp64. That of 128 is 0.

    Published likelihoods of raw audio (SampleRNN, SaShiMi and those that compare with them) are of these classes: u in
    0..1 becomes floor(255.99 u + 0.005). Source: `quantize` in
    https://github.com/state-spaces/s4/blob/main/src/dataloaders/audio.py
    """
    return 2 * (np.arange(1, NUM_CLASSES) - OFFSET) / SCALE - 1


def floor_values() -> np.ndarray:
    """The middle of every class, [256] fp64.

    The published code decodes to where a class begins, so that half of its classes do not come back when they are
    encoded again; likelihoods do not depend on it.
    """
    return 2 * (np.arange(NUM_CLASSES) + 0.5 - OFFSET) / SCALE - 1


def expand(companded: np.ndarray) -> np.ndarray:
    """Mu-law: companded values in -1..1, fp64 -> amplitudes in -1..1, fp64."""
    return np.sign(companded) * np.expm1(np.abs(companded) * np.log1p(_MU)) / _MU


def classes_of(modality: Mapping[str, Any]) -> SoundClasses | None:
    """The classes of a data set, by what dataset.json says of it; None if it is not sound, or of a newer version."""
    quantiser = str(modality.get("quantiser", "mu-law"))
    if modality.get("kind") != "audio" or quantiser.removesuffix("-floor") not in ("mu-law", "linear"):
        return None
    is_floor = quantiser.endswith("-floor")
    values, bounds = (floor_values(), floor_bounds()) if is_floor else (nearest_values(), nearest_bounds())
    if quantiser.startswith("mu-law"):
        values, bounds = expand(values), expand(bounds)
    return SoundClasses(tuple(values.tolist()), tuple(bounds.tolist()))
