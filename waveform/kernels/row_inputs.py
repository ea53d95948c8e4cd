"""What a compiled step begins and ends with, whatever the model: vectors of inputs, and what is added to logits.

A row's vector is the sum of those of its token, its label and its predictors. The density of what the predictors expect
is added to its logits.

Shape letters: B rows, V classes, V' padded to whole vectors, N labels with unknown (models/label_embedding.py), D'
model width padded to whole vectors, F features.
"""

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from waveform.kernels.compiling import kernel
from waveform.kernels.dense import DenseWeights, as_vectors, zeros
from waveform.kernels.density import add_density
from waveform.kernels.prediction import ROW, advance, lay_out_rows
from waveform.kernels.rows import add_rows, copy
from waveform.kernels.vectors import LANES, at, doubles, fill, fma, get_int64, load, padded, put, store
from waveform.models.linear_prediction import HISTORY, NUM_FEATURES, NUM_HEAD_INPUTS, ORDER

# What a decoder's row has besides its predictors, in the same record.
_OTHERS = (
    ("heard", np.float64, (HISTORY,)),  # the newest sample last
    ("features", np.float64, (NUM_FEATURES,)),
    ("for_head", np.float64, (NUM_HEAD_INPUTS,)),
)


def lay_out_ends(model: Any, state: Any, *, head: DenseWeights, num_rows: int) -> tuple[dict[str, Any], np.ndarray]:
    """Inputs and logits of the rows of `state`, and what inputs are made of: embedding, labels and linear prediction.

    num_rows: B. Also returns records [B] of what rows have heard and expect; none without linear prediction.
    """
    labels, prediction, width = model.label_embedding, model.linear_prediction, padded(model.embedding.weight.shape[1])
    fields = {
        "num_rows": num_rows,  # B
        "width": width,  # D'
        "num_classes": model.config.vocab_size,  # V
        "num_logits": head.num_outputs,  # V', and those of linear prediction
        "x": zeros(num_rows, width),  # inputs, then the residual stream
        "logits": zeros(num_rows, head.num_outputs),
        "embedding": as_vectors(model.embedding.weight),  # [V + 1, D']
        "num_labels": 0 if labels is None else len(labels.table),  # 0: nothing is added
        "label_embedding": as_vectors(torch.zeros(0, width) if labels is None else labels.table),  # [N, D']
        # [B] int64; kernels write to it even if nothing reads it
        "row_labels": np.zeros(num_rows, dtype=np.int64) if labels is None else state.labels[0].numpy().copy(),
        "predicts": prediction is not None,
        **dict.fromkeys(("expected_vectors", "feature_vectors", "class_values", "class_log_widths"), 0),
        **dict.fromkeys(("amplitudes", "bounds", "log_widths", "widening"), 0),
    }
    if prediction is None:
        return fields, np.zeros(0, dtype=[*_OTHERS, *ROW])
    rows = lay_out_rows(state.predictors[0], *_OTHERS)
    rows["heard"] = state.predictors[0].history.numpy()
    fields |= {
        "expected_vectors": as_vectors(prediction.table),  # [V, D']
        "feature_vectors": as_vectors(prediction.features.weight.t()),  # [F, D']
        "class_values": as_vectors(torch.tensor(prediction.values[:-1])),  # [V']
        "class_log_widths": as_vectors(torch.tensor(prediction.log_widths)),  # [V']
        "amplitudes": prediction.values,  # [V + 1] fp64, as the following
        "bounds": prediction.bounds,  # [V - 1]
        "log_widths": prediction.log_widths,  # [V]
        "widening": prediction.widening,  # [P]
    }
    return fields, rows


def lay_out_head(projection: nn.Linear, *, num_classes: int, int8: bool) -> DenseWeights:
    """A head's last layer: to logits, in whole vectors with -inf as padding; then to what makes a density, if any."""
    weight, *of_density = projection.weight.split(num_classes)
    bias, *biases_of_density = projection.bias.split(num_classes)
    num_padding = padded(num_classes) - num_classes
    weights = [F.pad(weight, (0, 0, 0, num_padding)), *of_density]
    biases = [F.pad(bias, (0, num_padding), value=-math.inf), *biases_of_density]
    return DenseWeights([torch.cat(weights)], [torch.cat(biases)], int8=int8)


@kernel
def embed_rows(tokens, sound, p):
    """Write the inputs of a step, `x` of the plan, for tokens [B]; one from V on begins an utterance with its label."""
    for b in range(p.num_rows):
        token, x = tokens[b], at(p.x, b * p.width)
        if token >= p.num_classes:
            put(p.row_labels, b, token - p.num_classes)
            token = p.num_classes
        copy(at(p.embedding, token * p.width), x, p.width)
        if p.num_labels:
            of_label = at(p.label_embedding, get_int64(p.row_labels, b) * p.width)
            add_rows(x, 0, of_label, 0, x, 0, 1, p.width)
        if p.predicts:
            _predict(token, x, sound[b], p)


@kernel
def _predict(token, x, row, p):
    """Take in the input of a row, and add what follows from it to its vector x."""
    heard, features = row.heard, row.features
    for i in range(HISTORY - 1):
        heard[i] = heard[i + 1]
    heard[HISTORY - 1] = numba.carray(doubles(p.amplitudes), (p.num_classes + 1,))[token]
    bounds = numba.carray(doubles(p.bounds), (p.num_classes - 1,))
    log_widths = numba.carray(doubles(p.log_widths), (p.num_classes,))
    widening = numba.carray(doubles(p.widening), (ORDER,))
    centre = advance(heard, HISTORY - 1, row, bounds, log_widths, widening, features, row.for_head)
    for i in range(0, p.width, LANES):
        sum_ = load(p.expected_vectors, centre * p.width + i)
        for f in range(NUM_FEATURES):
            sum_ = fma(fill(np.float32(features[f])), load(p.feature_vectors, f * p.width + i), sum_)
        store(x, i, load(x, i) + sum_)


@kernel
def predict_logits(sound, p):
    """Add the density of what is expected to the logits [V'] of every row, as `PredictionHead` does, if p.predicts."""
    for b in range(p.num_rows if p.predicts else 0):
        logits = at(p.logits, b * p.num_logits)
        of_density = at(logits, p.num_logits - LANES)
        add_density(logits, of_density, sound[b].for_head, p.class_values, p.class_log_widths, p.num_classes, logits)
