"""What kernels are told: one record of addresses and sizes, and each thread's part of the work."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from waveform.compiled.simd import compiled


def make_record(fields: Mapping[str, int | float]) -> np.ndarray:
    """One record [1] with these fields, of int64 and float32."""
    kinds = tuple((name, np.float32 if isinstance(value, float) else np.int64) for name, value in fields.items())
    return np.array([tuple(fields.values())], dtype=_kind(kinds))


@functools.cache
def _kind(fields: tuple[tuple[str, type], ...]) -> np.dtype[Any]:
    """One object per type: at each call numba compares equal but different objects field by field, which takes 6 us."""
    return np.dtype(list(fields))


@compiled
def share(amount, part, num_parts):
    """The range of `amount` that falls to `part`."""
    return amount * part // num_parts, amount * (part + 1) // num_parts
