"""The first work of a compiled step: each row's input vector, of its token, its label and its predictors.

Shape letters: B rows, N labels with unknown (models/label_embedding.py), D' model width padded to whole vectors.
"""

from typing import Any

import torch

from waveform.kernels.dense import pad_last
from waveform.kernels.row_predictions import lay_out_predictions, predict_row
from waveform.kernels.rows import add_rows, copy
from waveform.kernels.vectors import at, get_int64, kernel, put


def lay_out_inputs(model: Any, state: Any, *, num_rows: int, width: int) -> dict[str, Any]:
    """What makes the inputs of the rows of `state`, of a model with an embedding, labels and linear prediction.

    num_rows: B; width: D'.
    """
    embedding, labels = model.embedding.weight.detach(), model.label_embedding
    table = torch.zeros(0, width) if labels is None else labels.table.detach()
    # Kernels write to it even if nothing reads it.
    row_labels = torch.zeros(num_rows, dtype=torch.int64) if labels is None else state.labels[0]
    return {
        "embedding": pad_last(embedding).clone().numpy(),  # [V + 1, D']
        "label_embedding": pad_last(table).clone().numpy(),  # [N, D']
        "row_labels": row_labels.clone().numpy(),  # [B] int64
        "num_labels": len(table),  # 0: nothing is added
        **lay_out_predictions(model.linear_prediction, state.predictors, width=width),
    }


@kernel
def embed_rows(tokens, p):
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
            predict_row(b, token, x, p)
