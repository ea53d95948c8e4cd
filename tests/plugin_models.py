"""Two models as another package would bring them: an LSTM with what the contract requires, and one with all of it.

Shape letters: B rows, T steps, D width, V classes.
"""

from __future__ import annotations  # as other packages may

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from waveform.engine.interface import Decoder, OptionalParts, Step
from waveform.models.heads import SoftmaxHead
from waveform.models.model_config import Width


class LSTMState(NamedTuple):
    h: Tensor  # [B, D]
    c: Tensor  # [B, D]


@dataclass
class LSTMConfig:
    vocab_size: int
    d_model: Width = 16
    window: int | None = None


class LSTM(nn.Module):
    """Only what `SequenceModel` requires."""

    Config = LSTMConfig

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.cell = nn.LSTMCell(config.d_model, config.d_model)
        self.head = SoftmaxHead(config.d_model, vocab_size=config.vocab_size)

    def init_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> LSTMState:
        zeros = torch.zeros(batch_size, self.cell.hidden_size, device=device, dtype=dtype)
        return LSTMState(zeros, zeros.clone())

    def forward(self, tokens: Tensor, state: LSTMState) -> Step:
        hidden, new = self.unroll(tokens, state)
        return Step(hidden, LSTMState(*(tensor.detach() for tensor in new)), {})

    def unroll(self, tokens: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """Hidden vectors [B, T, D] and the state after them, of the dtype of the one that came."""
        x_BTD = self.embedding(tokens)
        h, c = (tensor.to(x_BTD.dtype) for tensor in state)
        hidden = []
        for x_BD in x_BTD.unbind(dim=1):
            h, c = self.cell(x_BD, (h, c))
            hidden.append(h)
        return torch.stack(hidden, dim=1), LSTMState(h.to(state.h.dtype), c.to(state.c.dtype))


def _noted(name: str, value: object) -> property:
    """A part of the contract that notes in `used` that something asked for it."""
    return property(lambda self: self.used.add(name) or value)


class FullLSTM(LSTM, OptionalParts):
    """Every part of `OptionalParts`; `used` collects the names of those that something asked for."""

    used: ClassVar[set[str]] = set()
    carry_gradient = False
    checkpoint_activations = False
    why_no_int8 = None
    has_own_threads = _noted("has_own_threads", True)
    receptive_field = _noted("receptive_field", 100)
    trains_through_time = _noted("trains_through_time", True)

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.summary = nn.Linear(config.d_model, 4)
        self.expansion = nn.Linear(4, config.d_model)

    def forward(self, tokens: Tensor, state: LSTMState) -> Step:
        if self.checkpoint_activations and torch.is_grad_enabled():
            self.used.add("checkpoint_activations")
            hidden, new = checkpoint(self.unroll, tokens, state, use_reentrant=False)
        else:
            hidden, new = self.unroll(tokens, state)
        if self.carry_gradient:
            self.used.add("carry_gradient")
        else:
            new = LSTMState(*(tensor.detach() for tensor in new))
        summed_up = self.expansion(self.summary(hidden.detach()))
        return Step(hidden, new, {"summary": (summed_up - hidden.detach()).square().mean(dim=2).sum(dim=1)})

    def compressor_parameters(self) -> list[nn.Parameter]:
        self.used.add("compressor_parameters")
        return [*self.summary.parameters(), *self.expansion.parameters()]

    def sharding_units(self, window: int) -> list[nn.Module]:
        self.used.add("sharding_units")
        return [self.summary]

    def decoder(self, state: LSTMState, *, int8: bool = False) -> LSTMDecoder:
        self.used.add("int8 decoder" if int8 else "decoder")
        return LSTMDecoder(self, state, int8=int8)


class LSTMDecoder(Decoder):
    """Steps a FullLSTM; with int8 its cell's weights are rounded to 8 bits, with a scale a row."""

    def __init__(self, model: FullLSTM, state: LSTMState, *, int8: bool) -> None:
        cell = model.cell
        self._model, self._state = model, (state.h, state.c)
        weights = [cell.weight_ih.detach(), cell.weight_hh.detach()]
        self._weights = [_rounded(weight) for weight in weights] if int8 else weights
        self._biases = cell.bias_ih.detach(), cell.bias_hh.detach()

    def step(self, tokens: Tensor) -> Tensor:
        x_BD = self._model.embedding(tokens)
        self._state = torch.lstm_cell(x_BD, self._state, *self._weights, *self._biases)
        return self._model.head.logits(self._state[0][:, None])[:, 0]


def _rounded(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round() * scale
