"""Random numbers that belong to a row and a count: environments and actors draw from them.

A number is a hash of (seed, stream, row, count), so a row's episodes do not depend on which process has the row or on
what else was drawn, and nothing but counts has to be saved. The hash is splitmix64's finaliser (Steele et al. 2014).
"""

import numpy as np


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = bits + 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


class RandomRows:
    """One stream of random numbers for each row."""

    def __init__(self, seed: int, *, stream: int, rows: np.ndarray) -> None:
        """stream: a number for each purpose, so that their draws differ; rows: indices [N] over all processes."""
        self._keys = _mixed(_mixed(np.full(len(rows), seed ^ stream << 32, np.uint64)) ^ rows.astype(np.uint64))

    def uniform(self, counts: np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """counts [n] of `rows`, which are places among this process's -> numbers [n] in [0, 1)."""
        bits = _mixed(self._keys[rows] ^ _mixed(counts.astype(np.uint64)))
        return np.asarray((bits >> 11) * 2.0**-53)
