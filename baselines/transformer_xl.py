"""Transformer-XL (Dai et al. 2019): segment-level recurrence and relative positions, nothing compressed.

It is the Compressive Transformer's trunk without compressed memory: same attention, same memory, same state. Its
ablations are fields: `position`, and `memory=0` for no recurrence. With both it is a plain Transformer.
"""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from baselines.position_encodings import ENCODINGS, EncodedAttention, LearnedEncoding, ShawEncoding, absolute_encoding
from waveform.decoding.compressive_transformer import CompressiveTransformerWithDecoders
from waveform.engine.interface import Decoder
from waveform.models.dropout import Dropout
from waveform.models.initial_values import INIT_STD
from waveform.models.model_config import MAX_SLOTS, Width
from waveform.models.token_model import TokenState
from waveform.models.transformer_config import CompressiveTransformerConfig, SlotsOfLayers, TransformerConfig
from waveform.system.errors import UserError
from waveform.system.rules import one_of, whole_number


@dataclass
class TransformerXLConfig(TransformerConfig):
    """Fields of `model=transformer_xl`; the defaults are the 40M-parameter speech model."""

    d_feedforward: Width = 1792
    memory: SlotsOfLayers = 1536  # slots, one step each; a list: one number for each layer
    # relative; shaw | absolute | learned: for ablations (attention=reference only)
    position: Annotated[str, one_of(*ENCODINGS)] = "relative"
    # With position=shaw: distance in steps from which all distances share a vector
    max_distance: Annotated[int, whole_number(1, MAX_SLOTS)] = 512
    # step: drawn anew for each step; window: one for all steps of a window (variational)
    dropout_mask: Annotated[str, one_of("step", "window")] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position != "relative" and self.clamp_len:
            raise UserError(f"model.clamp_len is for model.position=relative, not {self.position}; set it to 0")
        if self.position == "learned" and self.memory:
            raise UserError(
                f"model.position=learned knows the places of one window only, but model.memory is {self.memory}; set "
                "model.memory=0, or choose another model.position"
            )


class VariationalDropout(Dropout):
    """Dropout with one mask for all steps of a call (Gal and Ghahramani 2016; AWD-LSTM, Merity et al. 2017)."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """-> [B, T, D]."""
        return x_BTD * super().forward(torch.ones_like(x_BTD[:, :1]))


class TransformerXL(CompressiveTransformerWithDecoders):
    """Transformer-XL over tokens 0..V - 1, with V as the begin-of-utterance input."""

    Config = TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        shared = {field.name: getattr(config, field.name) for field in fields(TransformerConfig)}
        if config.position != "relative":
            shared["attention"] = "reference"
        super().__init__(
            CompressiveTransformerConfig(**shared, compressed=0, compression_rate=1, compression_loss="none")
        )
        self._scale_of_positions: float | None = None  # of absolute ones, which are added to embeddings
        if config.position != "relative":
            self._encode_positions(config)
        if config.dropout_mask == "window":
            self.dropout = VariationalDropout(config.dropout)
            for layer in self.layers:
                layer.dropout = VariationalDropout(config.dropout)

    def _encode_positions(self, config: TransformerXLConfig) -> None:
        """Give every layer an attention that knows positions in another way."""
        d_model, num_heads = config.d_model, config.num_heads
        if config.position == "absolute":  # as large as the embeddings are at first
            of_norm = 1.0 if config.norm == "post" else INIT_STD
            self._scale_of_positions = INIT_STD * math.sqrt(d_model) if config.tie_embeddings else of_norm
        for layer in self.layers:
            encoding: ShawEncoding | LearnedEncoding | None = None
            if config.position == "shaw":
                encoding = ShawEncoding(d_model, num_heads=num_heads, max_distance=config.max_distance)
            elif config.position == "learned":
                encoding = LearnedEncoding(d_model, window=config.window)
                layer.register_forward_pre_hook(_add_positions)
            attention = EncodedAttention(layer.config, encoding)
            attention.output = layer.attention.output  # initialised for the depth
            layer.attention = attention

    def embed(self, tokens_BT: Tensor, steps_B: Tensor) -> Tensor:
        """Embeddings, and absolute positions if there are any -> [B, T, D]."""
        h_BTD = super().embed(tokens_BT, steps_B)
        if self._scale_of_positions is None:
            return h_BTD
        places_BT = (steps_B % self.config.window)[:, None] + torch.arange(tokens_BT.shape[1])
        return h_BTD + absolute_encoding(places_BT, scale=self._scale_of_positions, like=h_BTD)

    @property
    def why_no_int8(self) -> str | None:
        """As the Compressive Transformer's; no decoder knows other encodings of positions."""
        if isinstance(self.layers[0].attention, EncodedAttention):
            return "int8 sampling supports model.position=relative only"
        return super().why_no_int8

    def decoder(self, state: TokenState, *, int8: bool = False) -> Decoder | None:
        """As the Compressive Transformer's; None with other encodings of positions."""
        return None if isinstance(self.layers[0].attention, EncodedAttention) else super().decoder(state, int8=int8)


def _add_positions(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the vectors of the steps' places to a layer's input, in a hook: FSDP needs it within the layer's call."""
    h_BTD, slots, window, usage, clock, *run = inputs
    added = layer.attention.encoding.added_to_input(clock.slots.query_times, like=h_BTD)
    return h_BTD + added, slots, window, usage, clock, *run
