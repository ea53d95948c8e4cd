"""The predictors of linear_prediction.py as compiled functions, in fp64: for whole calls, and for decoders' steps.

One row at a time, one sample at a time, in the order that the code states: what is computed for a row depends neither
on other rows nor on how its stream is cut. The tests compare it with the operations of torch.

Shape letters: B rows, K predictors, P order, E speeds, V classes.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from waveform.kernels.compiling import kernel
from waveform.models import linear_prediction as lp
from waveform.models.linear_prediction import LinearPrediction, Prediction, PredictionState

_K, _P, _E = lp.NUM_PREDICTORS, lp.ORDER, lp.NUM_SPEEDS
_BLOCK, _HISTORY, _CLIP, _SPEED = lp.BLOCK, lp.HISTORY, lp.CLIP, lp._SPEED
_FORGETTING, _DECAYS = np.array(lp.FORGETTING), np.array(lp.ERROR_DECAYS)
_NOISE, _MAX_REFLECTION = lp._NOISE, lp._MAX_REFLECTION


# What the predictors of a row remember, apart from its history: fields of `PredictionState`.
ROW: list[tuple[Any, ...]] = [
    ("steps", np.int64),
    ("moments", np.float64, (_K, _P + 1)),
    ("coefficients", np.float64, (_K, _P)),
    ("expected", np.float64, (_K,)),
    ("energy", np.float64, (_K, _E)),
]


def lay_out_rows(state: PredictionState, *others: Any) -> np.ndarray:
    """Records [B] with the fields of `ROW`, from `state`, and the fields `others`, which are zeros."""
    rows = np.zeros(len(state.steps), dtype=[*others, *ROW])
    for name, *_ in ROW:
        rows[name] = getattr(state, name).numpy()
    return rows


def read_rows(model: LinearPrediction, tokens: Tensor, state: PredictionState) -> tuple[Prediction, PredictionState]:
    """As `LinearPrediction.read`, on a CPU."""
    num_rows, num_steps = tokens.shape
    x = np.concatenate([state.history.numpy(), model.values[tokens.numpy()]], axis=1)
    rows = lay_out_rows(state)
    features = np.empty((num_rows, num_steps, lp.NUM_FEATURES))
    centre = np.empty((num_rows, num_steps), dtype=np.int64)
    for_head = np.empty((num_rows, num_steps, lp.NUM_HEAD_INPUTS))
    _read(x, rows, model.bounds, model.log_widths, model.widening, features, centre, for_head)
    after = {name: torch.from_numpy(rows[name].copy()) for name, *_ in ROW}
    history = torch.from_numpy(x[:, num_steps:].copy())
    return Prediction(*map(torch.from_numpy, (features, centre, for_head))), PredictionState(history=history, **after)


@kernel(entry=True)
def _read(x, rows, bounds, log_widths, widening, features, centre, for_head):
    for b in range(len(x)):
        for t in range(features.shape[1]):
            at = _HISTORY + t
            centre[b, t] = advance(x[b], at, rows[b], bounds, log_widths, widening, features[b, t], for_head[b, t])


@kernel
def advance(x, at, row, bounds, log_widths, widening, features, for_head):
    """Take in sample `at` of a row's x, and describe what is expected of the next; row: a record, see `ROW`.

    Returns the class of the mean expectation.
    """
    coefficients, expected, energy = row.coefficients, row.expected, row.energy
    mean_scale = 0.0
    for k in range(_K):
        error = x[at] - expected[k]
        for speed in range(_E):
            energy[k, speed] = _DECAYS[speed] * energy[k, speed] + (1 - _DECAYS[speed]) * error * error
            features[k * _E + speed] = (math.log(energy[k, speed]) / 2 + 5) / 2
        for_head[_K + k] = math.log(energy[k, _SPEED]) / 2
        scale = math.exp(for_head[_K + k])
        mean_scale += scale / _K
        features[_K * (_E + 1) + k] = min(max(error / scale, -_CLIP), _CLIP) / 2
    past = x[at + 1 - _P : at + 1]
    for k in range(_K):
        a, b, c, d = 0.0, 0.0, 0.0, 0.0  # four sums, so that an addition need not wait for the one before it
        for i in range(0, _P, 4):
            a += coefficients[k, i] * past[i]
            b += coefficients[k, i + 1] * past[i + 1]
            c += coefficients[k, i + 2] * past[i + 2]
            d += coefficients[k, i + 3] * past[i + 3]
        expected[k] = min(max((a + b) + (c + d), -1.0), 1.0)
        for_head[k] = expected[k]
        log_width = log_widths[np.searchsorted(bounds, expected[k], side="right")]
        features[_K * _E + k] = (for_head[_K + k] - log_width) / 2
    mean = expected.mean()
    for k in range(_K):
        features[_K * (_E + 2) + k] = min(max((expected[k] - mean) / mean_scale, -_CLIP), _CLIP) / 2
    centre = np.searchsorted(bounds, mean, side="right")
    for_head[2 * _K] = log_widths[centre]
    row.steps += 1
    if row.steps % _BLOCK == 0:
        _fit(x[at + 1 - _HISTORY : at + 1], row.moments, widening, coefficients)
    return centre


@kernel
def _fit(x, moments, widening, coefficients):
    """Fit all filters of a row to the samples up to the last of x [HISTORY]."""
    scratch = np.empty((_P + 6, _HISTORY))
    newest = scratch[-1]  # the newest first: if indices may be negative, numba computes one element at a time
    for i in range(_HISTORY):
        newest[i] = x[_HISTORY - 1 - i]
    matrix, sums = scratch[: _P + 1, : _P + 1], scratch[_P + 1, : _P + 1]
    for k in range(_K):
        forgetting = _FORGETTING[k]
        for i in range(_P + _BLOCK - 1, _P - 1, -1):
            _add_products(newest[i:], forgetting, moments[k])
        _copy(moments[k], sums)
        for i in range(_P, -1, -1):  # R(i, i + d) is the sum at lag d that ends i samples ago
            for d in range(_P + 1 - i):
                matrix[i, i + d] = sums[d]
                matrix[i + d, i] = sums[d]
            if i:
                _add_products(newest[i - 1 :], forgetting, sums)
        _lattice(matrix, widening, coefficients[k], scratch[_P + 1 :, : _P + 1])


@kernel
def _copy(values, to):
    """`to[:] = values`, which would take numba two more seconds to compile: it would check that the shapes agree."""
    for i in range(len(values)):
        to[i] = values[i]


@kernel
def _add_products(newest, forgetting, sums):
    """Take one more sample into sums [P + 1] of products; `newest` begins with it."""
    last = newest[0]
    for d in range(_P + 1):
        sums[d] = sums[d] * forgetting + last * newest[d]


@kernel
def _lattice(matrix, widening, coefficients, vectors):
    """As `lattice` of linear_prediction.py, widened."""
    forward, backward, of_forward, of_backward = vectors[0], vectors[1], vectors[2], vectors[3]
    forward[:] = 0
    backward[:] = 0
    forward[0] = backward[1] = 1
    _copy(matrix[0], of_forward)
    for order in range(1, _P + 1):
        of_backward[:] = 0
        for j in range(order + 1):
            row, factor = matrix[j], backward[j]
            for i in range(_P + 1):
                of_backward[i] += row[i] * factor
        energy, product = 0.0, 0.0
        for i in range(order + 1):
            energy += forward[i] * of_forward[i] + backward[i] * of_backward[i]
            product += forward[i] * of_backward[i]
        reflection = min(max(2 * product / (energy + _NOISE), -_MAX_REFLECTION), _MAX_REFLECTION)
        carried = 0.0
        for i in range(order + 1):
            f, b = forward[i], backward[i]
            forward[i] = f - reflection * b
            backward[i] = carried
            carried = b - reflection * f
        if order < _P:
            backward[order + 1] = carried
        for i in range(_P + 1):
            of_forward[i] -= reflection * of_backward[i]
    for i in range(_P):
        coefficients[_P - 1 - i] = -forward[i + 1] * widening[i]
