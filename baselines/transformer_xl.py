"""Transformer-XL (Dai et al. 2019): segment-level recurrence and relative positions, nothing compressed.

It is the Compressive Transformer's trunk without compressed memory: same attention, same memory, same state.
"""

from dataclasses import asdict, dataclass

from waveform.decoding.compressive_transformer import CompressiveTransformerWithDecoders
from waveform.models.transformer_config import CompressiveTransformerConfig, TransformerConfig


@dataclass
class TransformerXLConfig(TransformerConfig):
    """Fields of `model=transformer_xl`; the defaults are the 40M-parameter speech model."""

    d_feedforward: int = 1792
    memory: int = 1536  # slots, one step each


class TransformerXL(CompressiveTransformerWithDecoders):
    """Transformer-XL over tokens 0..V - 1, with V as the begin-of-utterance input."""

    Config = TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        fields = asdict(config)
        super().__init__(
            CompressiveTransformerConfig(**fields, compressed=0, compression_rate=1, compression_loss="none")
        )
