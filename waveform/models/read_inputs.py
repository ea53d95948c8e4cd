"""The front of every model: tokens, and what labels and linear prediction add to their vectors.

Shape letters: B rows, T steps, D model width.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from waveform.models.label_embedding import LabelEmbedding, RowLabels
from waveform.models.linear_prediction import LinearPrediction, Prediction, PredictionState


class Inputs(NamedTuple):
    """What a model makes of its inputs before its first layer."""

    tokens: Tensor  # [B, T] in 0..V
    added: Tensor | None  # [B, T, D] to the tokens' vectors; None: nothing
    prediction: Prediction | None  # of the sample after each, for the head
    kept: dict[str, Any]  # fields of the state: labels and predictors after the last input


class Front(Protocol):
    """What a model has before its first layer, each None if it has none."""

    label_embedding: LabelEmbedding | None
    linear_prediction: LinearPrediction | None


def read_inputs(model: Front, tokens: Tensor, labels: RowLabels, predictors: tuple[PredictionState, ...]) -> Inputs:
    """tokens [B, T] in 0..V, or 0..V + N - 1 of a model with N labels; labels, predictors: of the state."""
    added = prediction = None
    label_embedding, linear_prediction = model.label_embedding, model.linear_prediction
    if label_embedding is not None:
        tokens, labels_BT, labels = label_embedding.read(tokens, labels)
        added = label_embedding(labels_BT)
    if linear_prediction is not None:
        prediction, after = _read(linear_prediction, tokens, predictors[0])
        vectors, predictors = linear_prediction(prediction), (after,)
        added = vectors if added is None else added + vectors
    return Inputs(tokens, added, prediction, {"labels": labels, "predictors": predictors})


def _read(predictors: LinearPrediction, tokens: Tensor, state: PredictionState) -> tuple[Prediction, PredictionState]:
    """By compiled kernels on a CPU, by operations of torch elsewhere."""
    if tokens.device.type == "cpu" and not is_in_torch_dispatch_mode():  # which would not see what they do
        from waveform.kernels.prediction import read_rows  # here: others do without numba

        return read_rows(predictors, tokens, state)
    return predictors.read(tokens, state)
