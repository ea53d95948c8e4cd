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


def class_bounds(*, floor: bool) -> np.ndarray:
    """Where classes 1 to 255 begin if a value in -1..1 is rounded to the nearest of 256, [255] fp64.

    floor: if it is rounded down; 128 then begins at 0. Published likelihoods of raw audio (SampleRNN, SaShiMi and those
    that compare with them) are of these classes: u in 0..1 becomes floor(255.99 u + 0.005). Source: `quantize` in
    https://github.com/state-spaces/s4/blob/main/src/dataloaders/audio.py
    """
    classes = np.arange(1, NUM_CLASSES)
    return 2 * (classes - OFFSET) / SCALE - 1 if floor else (2 * classes - 1) / _MU - 1


def class_values(*, floor: bool) -> np.ndarray:
    """The value of every class, [256] fp64; floor: its middle.

    The published code decodes to where a class begins, so that half of its classes do not come back when they are
    encoded again; likelihoods do not depend on it.
    """
    classes = np.arange(NUM_CLASSES)
    return 2 * (classes + 0.5 - OFFSET) / SCALE - 1 if floor else 2 * classes / _MU - 1


def expand(companded: np.ndarray) -> np.ndarray:
    """Mu-law: companded values in -1..1, fp64 -> amplitudes in -1..1, fp64."""
    return np.sign(companded) * np.expm1(np.abs(companded) * np.log1p(_MU)) / _MU


def classes_of(modality: Mapping[str, Any]) -> SoundClasses | None:
    """The classes of a data set, by what dataset.json says of it; None if it is not sound, or of a newer version."""
    quantiser = str(modality.get("quantiser", "mu-law"))
    if modality.get("kind") != "audio" or quantiser.removesuffix("-floor") not in ("mu-law", "linear"):
        return None
    floor = quantiser.endswith("-floor")
    values, bounds = class_values(floor=floor), class_bounds(floor=floor)
    if quantiser.startswith("mu-law"):
        values, bounds = expand(values), expand(bounds)
    return SoundClasses(tuple(values.tolist()), tuple(bounds.tolist()))
