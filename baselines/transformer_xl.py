"""Transformer-XL (Dai et al. 2019): segment-level recurrence and relative positions, nothing compressed.

It is the Compressive Transformer's trunk without compressed memory: same attention, same memory, same state.
"""

from dataclasses import asdict, dataclass, field

from waveform.decoding.compressive_transformer import CompressiveTransformerWithDecoders
from waveform.models.transformer_config import CompressiveTransformerConfig


@dataclass
class TransformerXLConfig:
    """Fields of `model=transformer_xl`; the defaults are the 40M-parameter speech model."""

    vocab_size: int
    num_layers: int = 20
    d_model: int = 384
    num_heads: int = 6
    d_feedforward: int = 1792
    window: int = 768  # steps that attend to each other directly
    memory: int = 1536  # slots, one step each
    norm: str = "pre"  # pre: more stable when deep; post: as published
    attention: str = "fused"  # fused | reference
    num_position_features: int = 64  # P, width of the sinusoidal encoding
    empty_memory: str = "mask"  # mask: empty slots are not attended; zeros: they are zero vectors
    dropout: float = 0.0
    head: str = "softmax"  # softmax | adaptive: for large vocabularies sorted by frequency; inputs are adaptive too
    cutoffs: list[int] = field(default_factory=list)  # first ids of the adaptive head's clusters after the first
    div_value: int = 4  # a cluster's vectors are so many times narrower than the one's before
    tie_embeddings: bool = False  # the head uses the vectors (and projections) of the input embedding

    def __post_init__(self) -> None:
        self.without_compression()

    def without_compression(self) -> CompressiveTransformerConfig:
        """The same trunk as a CompressiveTransformerConfig. Raises UserError for a value that it refuses."""
        return CompressiveTransformerConfig(**asdict(self), compressed=0, compression_rate=1, compression_loss="none")


class TransformerXL(CompressiveTransformerWithDecoders):
    """Transformer-XL over tokens 0..V - 1, with V as the begin-of-utterance input."""

    Config = TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config.without_compression())
