"""Linear prediction without a network: what a model with it knows before any training, as a model to be scored."""

import torch
from torch import Tensor, nn

from waveform.engine.interface import OptionalParts, Step
from waveform.engine.sound_classes import SoundClasses
from waveform.models.heads import PredictionHead
from waveform.models.label_embedding import LabelEmbedding
from waveform.models.linear_prediction import LinearPrediction, PredictionState, with_prediction
from waveform.models.read_inputs import read_inputs


class PredictorsAlone(nn.Module, OptionalParts):
    """Hidden vectors of nothing but what is expected, and a head as it begins; a SequenceModel."""

    def __init__(self, classes: SoundClasses) -> None:
        super().__init__()
        self.label_embedding: LabelEmbedding | None = None
        self.linear_prediction: LinearPrediction | None = LinearPrediction(1, classes=classes, std=0.0)
        self.head = PredictionHead(1, classes=classes)
        self.requires_grad_(False)

    def init_state(
        self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[PredictionState, ...]:
        """State of rows of which nothing has been read."""
        assert self.linear_prediction is not None
        return self.linear_prediction.init_state(batch_size, device=device)

    def forward(self, tokens: Tensor, state: tuple[PredictionState, ...]) -> Step:
        """tokens [B, T] in 0..V -> hidden [B, T, 1 + NUM_HEAD_INPUTS], of which the first is zero."""
        inputs = read_inputs(self, tokens, (), state)
        assert inputs.added is not None
        return Step(with_prediction(torch.zeros_like(inputs.added), inputs.prediction), inputs.kept["predictors"], {})
