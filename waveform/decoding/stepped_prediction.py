"""Linear prediction for decoders that step with torch: one input at a time, on buffers that never move.

Within a block a step is operations on the device only, so that a GPU can replay them; between blocks `advance` fits the
filters anew, without waiting for the device. Shape letters: B rows.
"""

import torch
from torch import Tensor

from waveform.models.linear_prediction import (
    BLOCK,
    HISTORY,
    ORDER,
    LinearPrediction,
    Prediction,
    PredictionState,
    describe,
    fit_blocks,
)


class SteppedPrediction:
    """The predictors of rows that are equally far, from a state on."""

    def __init__(self, model: LinearPrediction, state: PredictionState) -> None:
        self._constants = model.constants(state.history.device)
        self._phase = int(state.steps[0]) % BLOCK
        self._history, self._moments, self._coefficients, self._expected, self._energy = (x.clone() for x in state[1:])

    @property
    def steps_to_host(self) -> int:
        """Steps until the filters are fitted."""
        return BLOCK - self._phase

    def step(self, tokens: Tensor) -> Prediction:
        """tokens [B] in 0..V -> what is expected after them, [B, 1, ...]."""
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
        self._phase += num_steps
        if self._phase == BLOCK:
            fitted, moments = fit_blocks(self._constants, self._history, self._moments, ends=[HISTORY])
            self._coefficients.copy_(fitted[:, 0])
            self._moments.copy_(moments)
            self._phase = 0


def stepped_prediction(model: LinearPrediction | None, states: tuple[PredictionState, ...]) -> SteppedPrediction | None:
    """The predictors of a decoder's state; None if its model has none."""
    return None if model is None else SteppedPrediction(model, states[0])
