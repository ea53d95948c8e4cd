"""What linear prediction does in a compiled step: its vectors are added to the inputs, its density to the logits.

Shape letters: B rows, V classes, V' padded to whole vectors, D' model width padded to whole vectors, F features.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor, nn

from waveform.kernels.dense import DenseWeights, pad_last
from waveform.kernels.density import add_density
from waveform.kernels.prediction import SCRATCH_SHAPE, advance
from waveform.kernels.vectors import LANES, at, fill, fma, get_int64, kernel, load, padded, put, store
from waveform.models.heads import PredictionHead
from waveform.models.linear_prediction import (
    HISTORY,
    NUM_FEATURES,
    NUM_HEAD_INPUTS,
    NUM_PREDICTORS,
    NUM_SPEEDS,
    ORDER,
    LinearPrediction,
    PredictionState,
)

_ROOM = 4096  # samples that a row can take in before its history moves to the front
_K = NUM_PREDICTORS


class PredictionOfRows(NamedTuple):
    """The predictors of a decoder's rows."""

    predicts: bool  # False: nothing is added, and the rest is empty
    expected_vectors: np.ndarray  # [V, D'] fp32
    feature_vectors: np.ndarray  # [F, D'] fp32
    class_values: np.ndarray  # [V'] fp32
    class_log_widths: np.ndarray  # [V'] fp32
    amplitudes: np.ndarray  # [V + 1] fp64, as the following
    bounds: np.ndarray  # [V - 1]
    log_widths: np.ndarray  # [V]
    sound: np.ndarray  # [B, HISTORY + _ROOM]
    moments: np.ndarray  # [B, K, P + 1]
    coefficients: np.ndarray  # [B, K, P]
    expected: np.ndarray  # [B, K]
    energy: np.ndarray  # [B, K, E]
    features: np.ndarray  # [F]
    for_head: np.ndarray  # [B, NUM_HEAD_INPUTS]
    fit_scratch: np.ndarray
    num_read: np.ndarray  # [B] int64
    newest: np.ndarray  # [B] int64: place of the newest sample in `sound`


def lay_out_predictions(
    model: LinearPrediction | None, states: tuple[PredictionState, ...], *, width: int
) -> PredictionOfRows:
    """The predictors as a decoder's state has them; `width` is D'."""
    if model is None:
        return PredictionOfRows._make([False, *[np.zeros(1)] * (len(PredictionOfRows._fields) - 1)])
    (state,) = states
    num_rows = len(state.steps)

    def vectors(x: Tensor) -> np.ndarray:
        return pad_last(x.detach().float()).contiguous().clone().numpy()

    return PredictionOfRows(
        predicts=True,
        expected_vectors=vectors(model.table),
        feature_vectors=vectors(model.features.weight.t()),
        class_values=vectors(torch.tensor(model.values[:-1])),
        class_log_widths=vectors(torch.tensor(model.log_widths)),
        amplitudes=model.values,
        bounds=model.bounds,
        log_widths=model.log_widths,
        sound=np.concatenate([state.history.numpy(), np.zeros((num_rows, _ROOM))], axis=1),
        moments=state.moments.numpy().copy(),
        coefficients=state.coefficients.numpy().copy(),
        expected=state.expected.numpy().copy(),
        energy=state.energy.numpy().copy(),
        features=np.zeros(NUM_FEATURES),
        for_head=np.zeros((num_rows, NUM_HEAD_INPUTS)),
        fit_scratch=np.zeros(SCRATCH_SHAPE),
        num_read=state.steps.numpy().copy(),
        newest=np.full(num_rows, HISTORY - 1),
    )


def lay_out_head(projection: nn.Linear, head: nn.Module, *, int8: bool) -> DenseWeights:
    """A head's last layer: to logits, in whole vectors with -inf as padding; then to what makes a density, if any."""
    weight, bias = projection.weight.detach(), projection.bias.detach()
    if isinstance(head, PredictionHead):
        num_padding = padded(head.num_classes) - head.num_classes
        weights, biases = weight.split(head.num_classes), bias.split(head.num_classes)
        weight = torch.cat([weights[0], weight.new_zeros(num_padding, weight.shape[1]), *weights[1:]])
        bias = torch.cat([biases[0], bias.new_full((num_padding,), -torch.inf), *biases[1:]])
    return DenseWeights([weight], [bias], int8=int8, padding=-math.inf)


@intrinsic
def _doubles(typing_context, address):
    """A pointer to the float64 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.DoubleType().as_pointer())

    return types.CPointer(types.float64)(types.int64), generate


@kernel
def predict_row(b, token, x, p):
    """Take in the input of row b, and add what follows from it to its vector x."""
    room = HISTORY + _ROOM
    sound = numba.carray(_doubles(p.sound + b * room * 8), (room,))
    at, num_read = get_int64(p.newest, b) + 1, get_int64(p.num_read, b) + 1
    if at == room:
        for i in range(HISTORY):
            sound[i] = sound[room - HISTORY + i]
        at = np.int64(HISTORY)
    put(p.newest, b, at)
    put(p.num_read, b, num_read)
    sound[at] = numba.carray(_doubles(p.amplitudes), (p.num_classes + 1,))[token]
    features = numba.carray(_doubles(p.features), (NUM_FEATURES,))
    centre = advance(
        sound,
        at,
        num_read,
        numba.carray(_doubles(p.moments + b * _K * (ORDER + 1) * 8), (_K, ORDER + 1)),
        numba.carray(_doubles(p.coefficients + b * _K * ORDER * 8), (_K, ORDER)),
        numba.carray(_doubles(p.expected + b * _K * 8), (_K,)),
        numba.carray(_doubles(p.energy + b * _K * NUM_SPEEDS * 8), (_K, NUM_SPEEDS)),
        numba.carray(_doubles(p.bounds), (p.num_classes - 1,)),
        numba.carray(_doubles(p.log_widths), (p.num_classes,)),
        features,
        numba.carray(_doubles(p.for_head + b * NUM_HEAD_INPUTS * 8), (NUM_HEAD_INPUTS,)),
        numba.carray(_doubles(p.fit_scratch), SCRATCH_SHAPE),
    )
    for i in range(0, p.width, LANES):
        sum_ = load(p.expected_vectors, centre * p.width + i)
        for f in range(NUM_FEATURES):
            sum_ = fma(fill(np.float32(features[f])), load(p.feature_vectors, f * p.width + i), sum_)
        store(x, i, load(x, i) + sum_)


@kernel
def predict_logits(p):
    """Add the density of what is expected to the logits [V'] of every row, as `PredictionHead` does, if p.predicts."""
    for b in range(p.num_rows if p.predicts else 0):
        logits = at(p.logits, b * p.num_logits)
        expected = numba.carray(_doubles(p.for_head + b * NUM_HEAD_INPUTS * 8), (NUM_HEAD_INPUTS,))
        of_density = at(logits, p.num_logits - LANES)
        add_density(logits, of_density, expected, p.class_values, p.class_log_widths, p.num_classes, logits)
