"""The front of a model for decoders that step with torch: one input a row at a time, on buffers that never move.

Within a block of linear prediction a step is operations on the device only, so that a GPU can replay them; between
blocks `advance` fits the filters anew, without waiting for the device. Shape letters: B rows, D model width.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from waveform.models.linear_prediction import BLOCK, HISTORY, ORDER, Prediction, describe, fit_blocks
from waveform.models.token_model import TokenModel


class SteppedFront:
    """What labels and linear prediction add to the inputs of rows that are equally far, from a state on."""

    def __init__(self, model: TokenModel, state: Any) -> None:
        self._label_embedding, self._linear_prediction = model.label_embedding, model.linear_prediction
        self._row_labels = [labels.clone() for labels in state.labels]
        if self._linear_prediction is not None:
            before = state.predictors[0]
            self._constants = self._linear_prediction.constants(before.history.device)
            self._phase = int(before.steps[0]) % BLOCK
            self._history, self._moments, self._coefficients, self._expected, self._energy = map(
                torch.clone, before[1:]
            )

    @property
    def steps_to_host(self) -> int:
        """Steps until the filters are fitted; without linear prediction, nothing is ever due."""
        return sys.maxsize if self._linear_prediction is None else BLOCK - self._phase

    def step(self, tokens: Tensor) -> tuple[Tensor, list[Tensor], Prediction | None]:
        """tokens [B] as a model reads them -> tokens in 0..V, what is added to their vectors, and what a head is told.

        What is added is [B, D] each; what the head is told is of one step, [B, 1, ...].
        """
        added, prediction = [], None
        if self._label_embedding is not None:
            tokens, of_labels = self._label_embedding.step(tokens, self._row_labels[0])
            added.append(of_labels)
        if self._linear_prediction is not None:
            prediction = self._predict(tokens)
            added.append(self._linear_prediction(prediction)[:, 0])
        return tokens, added, prediction

    def _predict(self, tokens: Tensor) -> Prediction:
        constants, history = self._constants, self._history
        x = constants.values.index_select(0, tokens)[:, None]
        errors = x - self._expected
        self._energy.mul_(constants.decays).add_(errors[..., None] ** 2 * (1 - constants.decays))
        history.copy_(torch.cat([history[:, 1:], x], dim=1))
        expected = (self._coefficients * history[:, None, -ORDER:]).sum(dim=-1).clamp(-1, 1)
        self._expected.copy_(expected)
        return describe(constants, expected[:, None], self._energy[:, None], errors[:, None])

    def advance(self, num_steps: int) -> None:
        """Count steps, at most `steps_to_host`; fit the filters if a block is full."""
        if self._linear_prediction is None:
            return
        self._phase += num_steps
        if self._phase == BLOCK:
            fitted, moments = fit_blocks(self._constants, self._history, self._moments, ends=[HISTORY])
            self._coefficients.copy_(fitted[:, 0])
            self._moments.copy_(moments)
            self._phase = 0
