"""LSTM (Hochreiter and Schmidhuber 1997), the recurrent baseline of both papers' tables: tokens and state in, h out.

    tokens -> embedding -> dropout -> LSTM layer -> dropout -> LSTM layer -> ... -> dropout -> head

It has no window of its own: gradients flow through `train.unroll` windows of `train.window` tokens. Unless
`train.window` is set it is the chunk, and `train.unroll` above 1 then matters only if an update has several chunks.

Shape letters: B rows, T steps, L layers, D width of embeddings, h and c.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from waveform.engine.interface import Step, detach
from waveform.models.dropout import Dropout
from waveform.models.embeddings import token_embedding
from waveform.models.heads import output_head
from waveform.models.model_config import MAX_LAYERS, LargeVocabularyConfig, Width
from waveform.models.token_model import Inputs, TokenModel
from waveform.system.rules import BELOW_1, whole_number

_EMBEDDING_STD = 1.0  # as torch's; of vectors that are not shared with a head


@dataclass
class LSTMConfig(LargeVocabularyConfig):
    """Fields of `model=lstm`; the defaults have 40.0M parameters at 256 classes, as the other speech models."""

    num_layers: Annotated[int, whole_number(1, MAX_LAYERS)] = 3
    d_model: Width = 1280  # D
    # Dropout of a layer's inputs and outputs, not of its recurrence (Zaremba et al. 2014)
    dropout: Annotated[float, BELOW_1] = 0.0


class LSTMState(NamedTuple):
    """What every layer keeps of the stream; zeros before its first step."""

    hidden: Tensor  # h [B, L, D]
    cell: Tensor  # c [B, L, D]


class LSTM(TokenModel):
    """The trunk and the head; see the module's docstring and `LSTMConfig`."""

    Config = LSTMConfig

    def __init__(self, config: LSTMConfig) -> None:
        embedding = token_embedding(config.d_model, config, std=_EMBEDDING_STD)
        super().__init__(config, embedding, width=config.d_model, std=_EMBEDDING_STD)
        self.config = config
        self.dropout = Dropout(config.dropout)
        between = config.dropout if config.num_layers > 1 else 0.0  # torch warns of dropout between layers of one
        self.layers = nn.LSTM(config.d_model, config.d_model, config.num_layers, batch_first=True, dropout=between)
        self.head = output_head(config.d_model, config, embedding=embedding)
        with torch.no_grad():  # forget gates start open (Gers et al. 2000), or what is old would halve at every step
            for layer in range(config.num_layers):
                getattr(self.layers, f"bias_ih_l{layer}")[config.d_model : 2 * config.d_model] = 1.0

    def empty_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> LSTMState:
        """As `TokenModel.empty_state`."""
        zeros = torch.zeros(batch_size, self.config.num_layers, self.config.d_model, device=device, dtype=dtype)
        return LSTMState(zeros, zeros.clone())

    def trunk(self, inputs: Inputs, state: LSTMState) -> Step:
        """The last layer's h [B, T, D] and the state after them, detached unless `carry_gradient`."""
        x_BTD = self.dropout(inputs.add_to(self.embedding(inputs.tokens)))
        before = tuple(part.transpose(0, 1).to(x_BTD.dtype).contiguous() for part in state)  # [L, B, D]
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and _cpu_has_bf16_layers()):
            hidden_BTD, after = self.layers(x_BTD, before)
        parts = (new.transpose(0, 1).contiguous().to(old.dtype) for new, old in zip(after, state, strict=True))
        after = LSTMState(*parts)
        return Step(self.dropout(hidden_BTD), after if self.carry_gradient else detach(after), {})


def _cpu_has_bf16_layers() -> bool:
    """Whether torch's LSTM runs in bf16 on this processor; without AVX-512 it fails, though linear layers do not."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
