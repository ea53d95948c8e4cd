"""What decoders that step with torch share, whatever the trunk: one input per row, on buffers that never move.

Within a block of linear prediction a step is operations on the device only, so that a GPU can replay them; between
blocks `advance` fits the filters anew, without waiting for the device. Shape letters: B rows, D model width, V classes.
"""

from typing import Any

import torch
from torch import Tensor

from waveform.engine.cuda_graph import DeviceDecoder
from waveform.models.linear_prediction import BLOCK, HISTORY, ORDER, Prediction, describe, fit_blocks, with_prediction
from waveform.models.token_model import TokenModel, TokenState


class SteppedDecoder(DeviceDecoder):
    """The front and the head of a model whose rows are equally far; a subclass steps the trunk between them."""

    def __init__(self, model: TokenModel, state: TokenState) -> None:
        self._model: Any = model
        self._row_labels = [labels.clone() for labels in state.labels]
        if model.linear_prediction is not None:
            before = state.predictors[0]
            self._constants = model.linear_prediction.constants(before.history.device)
            self._place_in_block = int(before.steps[0]) % BLOCK
            self._history, self._moments, self._coefficients, self._expected, self._energy = map(
                torch.clone, before[1:]
            )

    @property
    def steps_to_host(self) -> int:
        """Steps until the filters are fitted; without linear prediction, nothing is ever due."""
        return super().steps_to_host if self._model.linear_prediction is None else BLOCK - self._place_in_block

    def embed(self, tokens: Tensor) -> tuple[Tensor, Prediction | None]:
        """tokens [B] as a model reads them -> the trunk's inputs [B, D], and what the head is given, [B, 1, ...]."""
        model, added, prediction = self._model, [], None
        if model.label_embedding is not None:
            tokens, of_labels = model.label_embedding.step(tokens, self._row_labels[0])
            added.append(of_labels)
        if model.linear_prediction is not None:
            prediction = self._predict(tokens)
            added.append(model.linear_prediction(prediction)[:, 0])
        return sum(added, model.embedding(tokens)), prediction

    def logits(self, hidden: Tensor, prediction: Prediction | None) -> Tensor:
        """hidden [B, ...] of the trunk, and what `embed` returned -> logits [B, V]."""
        return self._model.head.logits(with_prediction(hidden[:, None], prediction))[:, 0]

    def _predict(self, tokens: Tensor) -> Prediction:
        constants, history = self._constants, self._history
        x = constants.values.index_select(0, tokens)[:, None]
        errors = x - self._expected
        self._energy.mul_(constants.decays).add_(errors[..., None] ** 2 * (1 - constants.decays))
        history.copy_(torch.cat([history[:, 1:], x], dim=1))
        expected = (self._coefficients * history[:, None, -ORDER:]).sum(dim=-1).clamp(-1, 1)
        self._expected.copy_(expected)
        return describe(constants, expected[:, None], self._energy[:, None], errors[:, None])

    @torch.inference_mode()
    def advance(self, num_steps: int) -> None:
        """As `DeviceDecoder.advance`; fits the filters if a block is full."""
        if self._model.linear_prediction is None:
            return
        self._place_in_block += num_steps
        if self._place_in_block == BLOCK:
            fitted, moments = fit_blocks(self._constants, self._history, self._moments, ends=[HISTORY])
            self._coefficients.copy_(fitted[:, 0])
            self._moments.copy_(moments)
            self._place_in_block = 0
