"""The record that kernels get."""

import numpy as np
import torch

from waveform.kernels.dense import DenseWeights
from waveform.kernels.plan import make_plan


def test_a_plan_holds_addresses_and_numbers() -> None:
    matrix, x = DenseWeights([torch.ones(4, 16)], int8=False), np.zeros(3)
    plan = make_plan({"matrix": matrix, "x": x, "size": 7, "epsilon": 0.5})
    assert plan.dtype.names == ("matrix", "x", "size", "epsilon")
    assert plan["matrix"][0] == matrix.data.ctypes.data and plan["x"][0] == x.ctypes.data
    assert plan["size"][0] == 7 and plan["epsilon"][0] == np.float32(0.5)


def test_plans_of_the_same_fields_have_one_type() -> None:
    """numba would compare equal types field by field at every call."""
    assert make_plan({"num_rows": 1}).dtype is make_plan({"num_rows": 2}).dtype
