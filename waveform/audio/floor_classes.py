"""Classes by truncation, for both quantisers: the unit interval cut into 256 equal parts, as SampleRNN's code does.

Published likelihoods of raw audio (SampleRNN, SaShiMi and those that compare with them) are of these classes: u in 0..1
becomes floor(255.99 u + 0.005). Source: `quantize` in https://github.com/state-spaces/s4/blob/main/src/dataloaders/audio.py
Our other quantisers round to the nearest of 256 values instead, so that -1 and 1 are values of their own.
"""

import numpy as np

_NUM_CLASSES = 256
_EPSILON = 0.01  # keeps u = 1 in the last class
SCALE, OFFSET = _NUM_CLASSES - _EPSILON, _EPSILON / 2


def boundaries() -> np.ndarray:
    """Where classes 1 to 255 begin, in -1..1, [255] fp64. That of 128 is 0."""
    return 2 * (np.arange(1, _NUM_CLASSES) - OFFSET) / SCALE - 1


def centres() -> np.ndarray:
    """The middle of every class, in -1..1, [256] fp64.

    The published code decodes to where a class begins, so that half of its classes do not come back when they are
    encoded again; likelihoods do not depend on it.
    """
    return 2 * (np.arange(_NUM_CLASSES) + 0.5 - OFFSET) / SCALE - 1
