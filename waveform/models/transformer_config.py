"""The settings of a Compressive Transformer, each checked when it is made."""

from dataclasses import dataclass, field

from waveform.models import attention, compression, heads
from waveform.models.embeddings import check_cutoffs
from waveform.system.errors import UserError


@dataclass
class CompressiveTransformerConfig:
    """Fields of `model=compressive_transformer`; the defaults are the 40M-parameter speech model."""

    vocab_size: int
    num_layers: int = 20
    d_model: int = 384
    num_heads: int = 6
    d_feedforward: int = 1024
    window: int = 768  # steps that attend to each other directly
    memory: int = 768  # slots, one step each
    compressed: int = 768  # slots, compression_rate steps each; 0 makes this a Transformer-XL
    compression: str = "conv"  # conv | max | mean | most_used | dilated, or one of another package
    compression_rate: int = 4
    compression_loss: str = "attention"  # attention | autoencode | none
    norm: str = "pre"  # pre: more stable when deep; post: Algorithm 1
    attention: str = "fused"  # fused | reference
    num_position_features: int = 64  # P, width of the sinusoidal encoding
    empty_memory: str = "mask"  # mask: empty slots are not attended; zeros: they are zero vectors (Algorithm 1)
    compressed_position: str = "time"  # time: centre of the steps covered; contiguous: unit steps behind memory
    dropout: float = 0.0
    head: str = "softmax"  # softmax | adaptive: for large vocabularies sorted by frequency; inputs are adaptive too
    cutoffs: list[int] = field(default_factory=list)  # first ids of the adaptive head's clusters after the first
    div_value: int = 4  # a cluster's vectors are so many times narrower than the one's before
    tie_embeddings: bool = False  # the head uses the vectors (and projections) of the input embedding

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "d_feedforward", "window", "compression_rate"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("memory", "compressed"):
            if getattr(self, name) < 0:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be 0 or more")
        choices = {
            "compression_loss": compression.LOSSES,
            "norm": ("pre", "post"),
            "attention": attention.IMPLEMENTATIONS,
            "empty_memory": ("mask", "zeros"),
            "compressed_position": ("time", "contiguous"),
            "head": heads.KINDS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"model.{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        check_cutoffs(self.cutoffs, vocab_size=self.vocab_size, div_value=self.div_value)
        if bool(self.cutoffs) != (self.head == "adaptive"):
            raise UserError(
                f"model.cutoffs is {self.cutoffs} with model.head={self.head}; head=adaptive needs some, such as "
                "[20000,40000,200000], and softmax takes none"
            )
        if self.d_model % self.num_heads:
            raise UserError(f"model.d_model {self.d_model} is no multiple of model.num_heads {self.num_heads}")
        if self.num_position_features < 2 or self.num_position_features % 2:
            raise UserError(f"model.num_position_features is {self.num_position_features}; it must be even, 2 or more")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}; it must be in [0, 1)")
        function = compression.compression_function(self.compression)
        if self.compressed and function.uses_attention and self.memory < self.window:
            raise UserError(
                f"model.compression={self.compression} looks at the attention that slots receive while in memory, so "
                f"model.memory ({self.memory}) must be at least model.window ({self.window})"
            )

    @property
    def temporal_range(self) -> int:
        """Steps that a stack reaches back from the start of a window: L (M + c C).

        Exact where c divides W and W divides M; else steps that wait for their group add up to c - 1 a layer.
        """
        return self.num_layers * (self.memory + self.compression_rate * self.compressed)
