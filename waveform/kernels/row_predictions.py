"""What linear prediction does in a compiled step: its vectors are added to the inputs, its density to the logits.

Shape letters: B rows, V classes, V' padded to whole vectors, D' model width padded to whole vectors, F features.
"""

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn

from waveform.kernels.dense import DenseWeights, pad_last
from waveform.kernels.density import add_density
from waveform.kernels.prediction import SCRATCH_SHAPE, advance
from waveform.kernels.vectors import LANES, at, doubles, fill, fma, get_int64, kernel, load, padded, put, store
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


_FIELDS = (
    *("predicts", "expected_vectors", "feature_vectors", "class_values", "class_log_widths", "amplitudes", "bounds"),
    *("log_widths", "sound", "moments", "coefficients", "expected", "energy", "features", "for_head", "fit_scratch"),
    *("num_read", "newest"),
)


def lay_out_predictions(
    model: LinearPrediction | None, states: tuple[PredictionState, ...], *, width: int
) -> dict[str, Any]:
    """The predictors as a decoder's state has them; `width` is D'. Without a model nothing is added to inputs."""
    if model is None:
        return dict.fromkeys(_FIELDS, 0)
    (state,) = states
    num_rows = len(state.steps)

    def vectors(x: Tensor) -> np.ndarray:
        return pad_last(x.detach().float()).contiguous().clone().numpy()

    return {
        "predicts": True,
        "expected_vectors": vectors(model.table),  # [V, D'] fp32
        "feature_vectors": vectors(model.features.weight.t()),  # [F, D'] fp32
        "class_values": vectors(torch.tensor(model.values[:-1])),  # [V'] fp32
        "class_log_widths": vectors(torch.tensor(model.log_widths)),  # [V'] fp32
        "amplitudes": model.values,  # [V + 1] fp64, as the following
        "bounds": model.bounds,  # [V - 1]
        "log_widths": model.log_widths,  # [V]
        "sound": np.concatenate([state.history.numpy(), np.zeros((num_rows, _ROOM))], axis=1),  # [B, HISTORY + _ROOM]
        "moments": state.moments.numpy().copy(),  # [B, K, P + 1]
        "coefficients": state.coefficients.numpy().copy(),  # [B, K, P]
        "expected": state.expected.numpy().copy(),  # [B, K]
        "energy": state.energy.numpy().copy(),  # [B, K, E]
        "features": np.zeros(NUM_FEATURES),
        "for_head": np.zeros((num_rows, NUM_HEAD_INPUTS)),
        "fit_scratch": np.zeros(SCRATCH_SHAPE),
        "num_read": state.steps.numpy().copy(),  # [B] int64
        "newest": np.full(num_rows, HISTORY - 1),  # [B] int64: place of the newest sample in `sound`
    }


def lay_out_head(projection: nn.Linear, head: nn.Module, *, int8: bool) -> DenseWeights:
    """A head's last layer: to logits, in whole vectors with -inf as padding; then to what makes a density, if any."""
    weight, bias = projection.weight.detach(), projection.bias.detach()
    if isinstance(head, PredictionHead):
        num_padding = padded(head.num_classes) - head.num_classes
        weights, biases = weight.split(head.num_classes), bias.split(head.num_classes)
        weight = torch.cat([weights[0], weight.new_zeros(num_padding, weight.shape[1]), *weights[1:]])
        bias = torch.cat([biases[0], bias.new_full((num_padding,), -torch.inf), *biases[1:]])
    return DenseWeights([weight], [bias], int8=int8, padding=-math.inf)


@kernel
def predict_row(b, token, x, p):
    """Take in the input of row b, and add what follows from it to its vector x."""
    room = HISTORY + _ROOM
    sound = numba.carray(doubles(p.sound + b * room * 8), (room,))
    at, num_read = get_int64(p.newest, b) + 1, get_int64(p.num_read, b) + 1
    if at == room:
        for i in range(HISTORY):
            sound[i] = sound[room - HISTORY + i]
        at = np.int64(HISTORY)
    put(p.newest, b, at)
    put(p.num_read, b, num_read)
    sound[at] = numba.carray(doubles(p.amplitudes), (p.num_classes + 1,))[token]
    features = numba.carray(doubles(p.features), (NUM_FEATURES,))
    centre = advance(
        sound,
        at,
        num_read,
        numba.carray(doubles(p.moments + b * _K * (ORDER + 1) * 8), (_K, ORDER + 1)),
        numba.carray(doubles(p.coefficients + b * _K * ORDER * 8), (_K, ORDER)),
        numba.carray(doubles(p.expected + b * _K * 8), (_K,)),
        numba.carray(doubles(p.energy + b * _K * NUM_SPEEDS * 8), (_K, NUM_SPEEDS)),
        numba.carray(doubles(p.bounds), (p.num_classes - 1,)),
        numba.carray(doubles(p.log_widths), (p.num_classes,)),
        features,
        numba.carray(doubles(p.for_head + b * NUM_HEAD_INPUTS * 8), (NUM_HEAD_INPUTS,)),
        numba.carray(doubles(p.fit_scratch), SCRATCH_SHAPE),
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
        expected = numba.carray(doubles(p.for_head + b * NUM_HEAD_INPUTS * 8), (NUM_HEAD_INPUTS,))
        of_density = at(logits, p.num_logits - LANES)
        add_density(logits, of_density, expected, p.class_values, p.class_log_widths, p.num_classes, logits)
