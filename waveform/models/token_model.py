"""What every model begins and ends with; a model's own file has its trunk.

    tokens -> embedding -+-> trunk -> hidden vectors -+-> head
    labels --------------+                            |
    linear prediction ---+----------------------------+

Shape letters: B rows, T steps, D model width.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from waveform.engine.interface import OptionalParts, Step, fp64_device
from waveform.models.label_embedding import LabelEmbedding, RowLabels
from waveform.models.linear_prediction import LinearPrediction, Prediction, PredictionState, with_prediction
from waveform.models.model_config import ModelConfig


class TokenState(NamedTuple):
    """What a model remembers of its streams."""

    trunk: Any
    labels: RowLabels = ()  # of the utterances being read; empty without labels
    predictors: tuple[PredictionState, ...] = ()  # one, or none without linear prediction


class Inputs(NamedTuple):
    """What a trunk reads."""

    tokens: Tensor  # [B, T] in 0..V
    added: Tensor | None  # [B, T, D], what labels and linear prediction add to the tokens' vectors; None: nothing

    def add_to(self, vectors: Tensor, part: slice = slice(None)) -> Tensor:
        """Vectors [B, T, D] of the tokens, or of a part of them, with what is added to them."""
        return vectors if self.added is None else vectors + self.added[:, part]


class TokenModel(nn.Module, OptionalParts, ABC):
    """A SequenceModel over tokens 0..V - 1. A subclass provides the trunk, the trunk's state, and a head."""

    def __init__(self, config: ModelConfig, embedding: nn.Module | None, *, width: int, std: float) -> None:
        """width, std: of the vectors that the trunk reads. embedding: None if it reads only what is added to tokens."""
        super().__init__()
        self.embedding: Any = embedding
        self.label_embedding = self.linear_prediction = None
        if config.num_labels:
            self.label_embedding = LabelEmbedding(width, num_labels=config.num_labels, vocab_size=config.vocab_size)
        if config.predicted_classes is not None:
            self.linear_prediction = LinearPrediction(
                width, classes=config.predicted_classes, std=std, widening=config.prediction_widening
            )

    @abstractmethod
    def empty_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> Any:
        """The trunk's state of `batch_size` streams of which nothing has been read."""

    @abstractmethod
    def trunk(self, inputs: Inputs, state: Any) -> Step:
        """Hidden vectors, the state after them (detached unless `carry_gradient`) and auxiliary losses."""

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> TokenState:
        """State of `batch_size` streams of which nothing has been read; the trunk's is of `dtype`."""
        state = TokenState(self.empty_state(batch_size, device=device, dtype=dtype))
        if self.label_embedding is not None:
            state = state._replace(labels=self.label_embedding.init_state(batch_size, device=device))
        if self.linear_prediction is not None:
            state = state._replace(predictors=self.linear_prediction.init_state(batch_size, device=device))
        return state

    def prepare_kernels(self) -> None:
        """Compile the trunk's kernels, and linear prediction's, which takes some 7 s unless they are kept on disk."""
        super().prepare_kernels()
        if (predictors := self.linear_prediction) is not None:
            from waveform.kernels import density  # here, to load numba only if it is used

            _read(predictors, torch.zeros(1, 1, dtype=torch.int64), *predictors.init_state(1, device="cpu"))
            density.compile_kernel()

    def forward(self, tokens: Tensor, state: TokenState) -> Step:
        """tokens [B, T] in 0..V, or 0..V + N - 1 of a model with N labels, any T >= 1."""
        added, prediction, (before, labels, predictors) = None, None, state
        if self.label_embedding is not None:
            tokens, labels_BT, labels = self.label_embedding.read(tokens, labels)
            added = self.label_embedding(labels_BT)
        if self.linear_prediction is not None:
            prediction, after = _read(self.linear_prediction, tokens, predictors[0])
            vectors, predictors = self.linear_prediction(prediction), (after,)
            added = vectors if added is None else added + vectors
        hidden, remembered, aux_losses = self.trunk(Inputs(tokens, added), before)
        return Step(with_prediction(hidden, prediction), TokenState(remembered, labels, predictors), aux_losses)


def _read(predictors: LinearPrediction, tokens: Tensor, state: PredictionState) -> tuple[Prediction, PredictionState]:
    """As `LinearPrediction.read`: by compiled kernels on a CPU, by operations of torch elsewhere."""
    if (device := fp64_device(tokens.device)) != tokens.device:
        (features, centre, for_head), after = _read(predictors, tokens.to(device), state)
        return Prediction(*(part.to(tokens.device) for part in (features.float(), centre, for_head.float()))), after
    if tokens.device.type == "cpu" and not is_in_torch_dispatch_mode():  # a FLOP counter would not see kernels
        from waveform.kernels.prediction import read_rows  # here, to load numba only if it is used

        return read_rows(predictors, tokens, state)
    return predictors.read(tokens, state)
