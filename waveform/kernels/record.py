"""What kernels are told: one record of addresses and sizes, and each thread's part of the work."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numba.core import types

from waveform.kernels.vectors import kernel


def _named_by_layout(record: types.Record) -> tuple[str, tuple[str]]:
    """What stands for a record type in the names of compiled functions, instead of numba's number of it.

    numba numbers types anew in each process. Two kernels, one of them from the disk, could bring code of the same name
    for records of different layouts, and the linker would give both the same.
    """
    return "Record", (hashlib.blake2b(record.name.encode(), digest_size=8).hexdigest(),)


_record_type: Any = types.Record
_record_type.mangling_args = property(_named_by_layout)


def make_record(fields: Mapping[str, int | float]) -> np.ndarray:
    """One record [1] with these fields, of int64 and float32."""
    kinds = tuple((name, np.float32 if isinstance(value, float) else np.int64) for name, value in fields.items())
    return np.array([tuple(fields.values())], dtype=_kind(kinds))


@functools.cache
def _kind(fields: tuple[tuple[str, type], ...]) -> np.dtype[Any]:
    """One object per type: at each call numba compares equal but different objects field by field, which takes 6 us."""
    return np.dtype(list(fields))


@kernel
def share(amount, part, num_parts):
    """The range of `amount` that falls to `part`."""
    return amount * part // num_parts, amount * (part + 1) // num_parts
