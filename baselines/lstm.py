"""LSTM (Hochreiter and Schmidhuber 1997), the recurrent baseline of both papers' tables: tokens and state in, h out.

    tokens -> embedding -> dropout -> LSTM layer -> dropout -> LSTM layer -> ... -> dropout -> head

It has no window of its own: gradients flow through one `train.window` (or chunk), and `train.unroll` makes that longer.

Shape letters: B rows, T steps, L layers, D width of embeddings, h and c.
"""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from waveform.engine.interface import OptionalParts, Step, detach, map_state
from waveform.engine.sound_classes import SoundClasses
from waveform.models import heads, linear_prediction
from waveform.models.dropout import Dropout
from waveform.models.embeddings import check_cutoffs, token_embedding
from waveform.models.label_embedding import RowLabels, label_embedding
from waveform.models.linear_prediction import PredictionState, with_prediction
from waveform.models.read_inputs import read_inputs
from waveform.models.transformer_config import MAX_LAYERS, Width
from waveform.system.errors import UserError
from waveform.system.rules import BELOW_1, check_rules, one_of, whole_number

_EMBEDDING_STD = 1.0  # as torch's; of vectors that are not shared with a head


@dataclass
class LSTMConfig:
    """Fields of `model=lstm`; the defaults have 40.0M parameters at 256 classes, as the other speech models."""

    vocab_size: Annotated[int, whole_number(1)]  # V; the input has one more id, begin-of-utterance
    num_layers: Annotated[int, whole_number(1, MAX_LAYERS)] = 3
    d_model: Width = 1280  # D
    # Of what goes into and comes out of a layer, not of its recurrence (Zaremba et al. 2014)
    dropout: Annotated[float, BELOW_1] = 0.0
    # softmax | adaptive: for large vocabularies sorted by frequency; inputs are adaptive too
    head: Annotated[str, one_of(*heads.KINDS)] = "softmax"
    cutoffs: list[int] = field(default_factory=list)  # first ids of the adaptive head's clusters after the first
    div_value: Width = 4  # how many times narrower a cluster's vectors are than those of the cluster before
    tie_embeddings: bool = False  # the head uses the vectors (and projections) of the input embedding
    # none | linear: the input and the head know what linear filters expect
    prediction: Annotated[str, one_of(*linear_prediction.KINDS)] = "none"
    # Of utterances, unknown included; 0: none. Decided by the data, as vocab_size is
    num_labels: Annotated[int, whole_number(0)] = 0
    classes: SoundClasses | None = None  # what tokens mean as amplitudes, for prediction=linear. Decided by the data

    def __post_init__(self) -> None:
        check_rules(self, section="model")
        if self.prediction != "none" and (self.head != "softmax" or self.tie_embeddings):
            raise UserError("model.prediction=linear is for model.head=softmax without model.tie_embeddings")
        check_cutoffs(self.cutoffs, head=self.head, vocab_size=self.vocab_size)


class LSTMState(NamedTuple):
    """What every layer keeps of the stream; zeros before its first step."""

    hidden: Tensor  # h [B, L, D]
    cell: Tensor  # c [B, L, D]
    labels: RowLabels = ()  # of the utterances that are read; empty without labels
    predictors: tuple[PredictionState, ...] = ()  # one, or none without linear prediction


class LSTM(nn.Module, OptionalParts):
    """The trunk and the head; see the module's docstring and `LSTMConfig`."""

    Config = LSTMConfig

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = token_embedding(
            config.d_model,
            vocab_size=config.vocab_size,
            cutoffs=config.cutoffs,
            div_value=config.div_value,
            tie_embeddings=config.tie_embeddings,
            project_first=False,
            std=_EMBEDDING_STD,
        )
        self.label_embedding = label_embedding(
            config.d_model, num_labels=config.num_labels, vocab_size=config.vocab_size
        )
        self.linear_prediction = linear_prediction.linear_prediction(
            config.d_model, config.prediction, config.classes, std=_EMBEDDING_STD
        )
        self.dropout = Dropout(config.dropout)
        between = config.dropout if config.num_layers > 1 else 0.0  # torch warns of dropout between layers of one
        self.layers = nn.LSTM(config.d_model, config.d_model, config.num_layers, batch_first=True, dropout=between)
        self.head = heads.output_head(
            config.d_model,
            vocab_size=config.vocab_size,
            cutoffs=config.cutoffs,
            div_value=config.div_value,
            project_first=False,
            tied_to=self.embedding if config.tie_embeddings else None,
            classes=config.classes if self.linear_prediction is not None else None,
        )
        with torch.no_grad():  # forget gates start open (Gers et al. 2000), or what is old would halve at every step
            for layer in range(config.num_layers):
                getattr(self.layers, f"bias_ih_l{layer}")[config.d_model : 2 * config.d_model] = 1.0

    def init_state(self, batch_size: int, *, device: torch.device | str, dtype: torch.dtype) -> LSTMState:
        """State of `batch_size` streams of which nothing has been read."""
        shape = (batch_size, self.config.num_layers, self.config.d_model)
        hidden, cell = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        labels = () if self.label_embedding is None else self.label_embedding.init_state(batch_size, device=device)
        predictors = (
            () if self.linear_prediction is None else self.linear_prediction.init_state(batch_size, device=device)
        )
        return LSTMState(hidden, cell, labels, predictors)

    def forward(self, tokens: Tensor, state: LSTMState) -> Step:
        """tokens [B, T] -> the last layer's h [B, T, D] and the state after them, detached unless `carry_gradient`."""
        inputs = read_inputs(self, tokens, state.labels, state.predictors)
        x_BTD = self.embedding(inputs.tokens)
        x_BTD = self.dropout(x_BTD if inputs.added is None else x_BTD + inputs.added)
        before = tuple(  # [L, B, D]
            part.transpose(0, 1).to(x_BTD.dtype).contiguous() for part in (state.hidden, state.cell)
        )
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and _cpu_has_bf16_layers()):
            hidden_BTD, after = self.layers(x_BTD, before)
        hidden, cell = (part.transpose(0, 1).contiguous() for part in after)
        after = LSTMState(hidden, cell, **inputs.kept)
        after = map_state(lambda new, old: new.to(old.dtype), after, state)
        return Step(
            with_prediction(self.dropout(hidden_BTD), inputs.prediction),
            after if self.carry_gradient else detach(after),
            {},
        )


def _cpu_has_bf16_layers() -> bool:
    """Whether torch's LSTM runs in bf16 on this processor; without AVX-512 it fails, though linear layers do not."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
