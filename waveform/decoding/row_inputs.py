"""The first work of a compiled step: each row's input vector, of its token, its label and its predictors.

Shape letters: B rows, N labels with unknown (models/label_embedding.py), D' model width padded to whole vectors.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have the types of what they are called with.

from typing import NamedTuple

import numpy as np

from waveform.compiled.simd import F32, LANES, add, compiled, get, load, put, store
from waveform.decoding.kernels import copy, pad_last
from waveform.decoding.row_predictions import predict_row
from waveform.models.label_embedding import LabelEmbedding, RowLabels

_I64 = np.int64(0)


class LabelsOfRows(NamedTuple):
    """What a step adds to rows whose utterances have labels."""

    label_embedding: np.ndarray  # [N, D']
    row_labels: np.ndarray  # [B] int64
    num_labels: int  # N; 0: nothing is added


def lay_out_labels(embedding: LabelEmbedding | None, labels: RowLabels, *, num_rows: int, width: int) -> LabelsOfRows:
    """The labels of a decoder's rows, as the state of its model has them; `width` is D'."""
    if embedding is None:
        return LabelsOfRows(np.zeros((1, width), dtype=np.float32), np.zeros(num_rows, dtype=np.int64), 0)
    table = pad_last(embedding.table.detach()).clone().numpy()
    return LabelsOfRows(table, labels[0].clone().numpy(), len(table))


@compiled
def embed_rows(tokens, p):
    """Write the inputs of a step, `x` of the plan, for tokens [B]; one from V on begins an utterance with its label."""
    for b in range(p.num_rows):
        token, x = tokens[b], p.x + b * p.width * 4
        if token >= p.num_classes:
            put(p.row_labels, b, token - p.num_classes)
            token = p.num_classes
        copy(p.embedding + token * p.width * 4, x, p.width)
        if p.num_labels:
            of_label = p.label_embedding + get(p.row_labels, b, _I64) * p.width * 4
            for i in range(0, p.width, LANES):
                store(x, i, add(load(x, i, F32), load(of_label, i, F32)))
        if p.predicts:
            predict_row(b, token, x, p)
