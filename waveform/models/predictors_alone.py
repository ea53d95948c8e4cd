"""Linear prediction without a network: what a model with it knows before any training, to be scored and to be heard."""

import copy
from typing import Any

import torch

from waveform.engine.interface import Step
from waveform.engine.sound_classes import SoundClasses
from waveform.models.heads import PredictionHead
from waveform.models.model_config import ModelConfig
from waveform.models.token_model import Inputs, TokenModel


class PredictorsAlone(TokenModel):
    """A model without a trunk: its hidden vectors hold only what the predictors expect, and its head is untrained."""

    def __init__(self, classes: SoundClasses) -> None:
        config = ModelConfig(len(classes.values), prediction="linear", classes=classes)
        super().__init__(config, None, width=1, std=0.0)
        self.head = PredictionHead(1, classes=classes)
        self.requires_grad_(False)

    def empty_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> tuple[()]:
        """As `TokenModel.empty_state`: nothing."""
        return ()

    def trunk(self, inputs: Inputs, state: tuple[()]) -> Step:
        """-> zeros [B, T, 1]."""
        assert inputs.added is not None
        return Step(torch.zeros_like(inputs.added), state, {})


def predictors_alone_of(model: Any) -> Any:
    """A copy of a model with linear prediction that samples from its predictors alone, at the speed of the model."""
    model = copy.deepcopy(model)
    projection = next(part for part in model.head.modules() if isinstance(part, PredictionHead)).projection
    beginning = PredictionHead(1, classes=model.config.classes).projection
    with torch.no_grad():
        projection.weight.zero_()
        projection.bias.copy_(beginning.bias)
    return model
