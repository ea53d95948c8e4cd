"""The record that kernels get."""

from typing import NamedTuple

import numpy as np
import torch

from waveform.decoding.kernels import DenseWeights
from waveform.decoding.plan import make_plan


class _Parts(NamedTuple):
    matrix: DenseWeights
    x: np.ndarray
    size: int
    epsilon: float


def test_a_plan_holds_addresses_and_numbers() -> None:
    parts = _Parts(DenseWeights([torch.ones(4, 16)], int8=False), np.zeros(3), 7, 0.5)
    plan = make_plan(parts)
    assert plan.dtype.names == ("matrix", "matrix_scales", "matrix_biases", "x", "size", "epsilon")
    assert plan["matrix_scales"][0] == parts.matrix.scales.ctypes.data and plan["x"][0] == parts.x.ctypes.data
    assert plan["size"][0] == 7 and plan["epsilon"][0] == np.float32(0.5)


def test_plans_of_the_same_fields_have_one_type() -> None:
    """numba would compare equal types field by field at every call."""

    class Sizes(NamedTuple):
        num_rows: int

    assert make_plan(Sizes(1)).dtype is make_plan(Sizes(2)).dtype
