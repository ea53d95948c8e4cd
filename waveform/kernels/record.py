"""What kernels are given: one record of addresses and sizes."""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numba.core import types
from torch import Tensor

from waveform.kernels.dense import DenseWeights


def _named_by_layout(record: types.Record) -> tuple[str, tuple[str]]:
    """What stands for a record type in the names of compiled functions, instead of its number in numba.

    numba numbers types anew in each process. Two kernels, one of them from the disk, could bring code of the same name
    for records of different layouts, and the linker would give both kernels the same code.
    """
    return "Record", (hashlib.blake2b(record.name.encode(), digest_size=8).hexdigest(),)


_record_type: Any = types.Record
_record_type.mangling_args = property(_named_by_layout)


def make_record(fields: Mapping[str, Any]) -> np.ndarray:
    """One record [1] with these fields: int64 numbers, float32 ones, and addresses of arrays, tensors, `DenseWeights`.

    (Seventy arguments handed from function to function took numba a minute to compile.) The caller must keep the arrays
    alive.
    """
    values = [value if isinstance(value, (int, float)) else address(value) for value in fields.values()]
    kinds = [np.float32 if isinstance(value, float) else np.int64 for value in values]
    return np.array([tuple(values)], dtype=_record_of(tuple(zip(fields, kinds, strict=True))))


def address(memory: np.ndarray | Tensor | DenseWeights) -> int:
    """The address of the first element; an array must be C-contiguous."""
    if isinstance(memory, Tensor):
        return memory.data_ptr()
    array = memory.data if isinstance(memory, DenseWeights) else memory
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


@functools.cache
def _record_of(fields: tuple[tuple[str, type], ...]) -> np.dtype[Any]:
    """One object per type: at each call numba compares equal but different objects field by field, which takes 6 us."""
    return np.dtype(list(fields))
