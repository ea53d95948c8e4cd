"""The settings of models with a memory that attention reads, each checked when it is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from waveform.engine.sound_classes import SoundClasses
from waveform.models import heads, linear_prediction
from waveform.models.attention import IMPLEMENTATIONS
from waveform.models.compression import LOSSES, compression_function
from waveform.models.embeddings import check_cutoffs
from waveform.system.errors import UserError
from waveform.system.rules import Rule, check_rules, one_of, whole_number

# Far above any model that was ever trained, and low enough for whatever is asked of a machine to be counted in time.
MAX_LAYERS, MAX_WIDTH, MAX_SLOTS = 1000, 2**16, 2**24
_WIDTH = whole_number(1, MAX_WIDTH)
SHARE_DROPPED = Rule(lambda value: 0 <= value < 1, "it must be at least 0 and below 1")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


@dataclass
class TransformerConfig:
    """Fields of the trunk: attention over memory and window, regardless of what happens to evicted slots."""

    vocab_size: int
    num_layers: int = 20
    d_model: int = 384
    num_heads: int = 6
    d_feedforward: int = 1024
    window: int = 768  # steps that attend to each other directly
    memory: int = 768  # slots, one step each
    norm: str = "pre"  # pre: more stable when deep; post: as published
    attention: str = "fused"  # fused | reference
    num_position_features: int = 64  # P, width of the sinusoidal encoding
    # Share of the layers, from the input, whose heads start with a preference for near steps (0, 1, 2, 4, ... back), so
    # that those above find what is in memory. 0: as published.
    local_layers: float = 0.5
    empty_memory: str = "mask"  # mask: empty slots are not attended to; zeros: they are zero vectors (Algorithm 1)
    dropout: float = 0.0
    head: str = "softmax"  # softmax | adaptive: for large vocabularies sorted by frequency; inputs are adaptive too
    cutoffs: list[int] = field(default_factory=list)  # first ids of the adaptive head's clusters after the first
    div_value: int = 4  # how many times narrower a cluster's vectors are than those of the cluster before
    tie_embeddings: bool = False  # the head uses the vectors (and projections) of the input embedding

    # How published Transformer-XLs differ from this model: what their weights need (`python -m recipes import`).
    activation: str = "gelu"  # gelu | relu: of the feed-forward network
    same_length: bool = False  # every query sees `memory` steps, itself included, instead of its window and all memory
    clamp_len: int = 0  # steps, the largest distance that positions tell apart; 0: no limit
    attention_dropout: float = 0.0  # of attention weights
    project_first: bool = False  # an adaptive head's first cluster has a projection too, another one than the input's

    # none: as published; linear: the input and the head know what linear filters expect (models/linear_prediction.py)
    prediction: str = "none"
    num_labels: int = 0  # of utterances, unknown included; 0: none. Decided by the data, as vocab_size is
    classes: SoundClasses | None = None  # what tokens mean as amplitudes, for prediction=linear. Decided by the data

    RULES: ClassVar[Mapping[str, Rule]] = {
        "vocab_size": whole_number(1),
        "num_layers": whole_number(1, MAX_LAYERS),
        "d_model": _WIDTH,
        "num_heads": _WIDTH,
        "d_feedforward": _WIDTH,
        "window": whole_number(1, MAX_SLOTS),
        "memory": whole_number(0, MAX_SLOTS),
        "norm": one_of("pre", "post"),
        "attention": one_of(*IMPLEMENTATIONS),
        "num_position_features": Rule(
            lambda value: value in range(2, MAX_WIDTH + 1, 2), f"it must be even, from 2 to {MAX_WIDTH}"
        ),
        "local_layers": Rule(lambda value: 0 <= value <= 1, "it must be a share of the layers, from 0 to 1"),
        "empty_memory": one_of("mask", "zeros"),
        "dropout": SHARE_DROPPED,
        "head": one_of(*heads.KINDS),
        "div_value": _WIDTH,
        "activation": one_of(*ACTIVATIONS),
        "clamp_len": whole_number(0, MAX_SLOTS),
        "attention_dropout": SHARE_DROPPED,
        "prediction": one_of(*linear_prediction.KINDS),
        "num_labels": whole_number(0),
    }

    def __post_init__(self) -> None:
        check_rules(self, self.RULES, section="model")
        check_cutoffs(self.cutoffs, head=self.head, vocab_size=self.vocab_size)
        if self.prediction != "none" and (self.head != "softmax" or self.tie_embeddings):
            raise UserError("model.prediction=linear is for model.head=softmax without model.tie_embeddings")
        if self.d_model % self.num_heads:
            raise UserError(f"model.d_model {self.d_model} is not a multiple of model.num_heads {self.num_heads}")
        if self.project_first and self.head != "adaptive":
            raise UserError(f"model.project_first is for model.head=adaptive, not {self.head}; leave it false")
        if self.same_length and not self.memory:
            raise UserError("model.same_length lets queries see model.memory steps, which is 0; give it a memory")

    @property
    def vocabulary(self) -> dict[str, Any]:
        """What embedding and head must agree on."""
        return {name: getattr(self, name) for name in ("vocab_size", "cutoffs", "div_value", "project_first")}


@dataclass
class CompressiveTransformerConfig(TransformerConfig):
    """Fields of `model=compressive_transformer`; the defaults are the 40M-parameter speech model."""

    compressed: int = 768  # slots, compression_rate steps each; 0 makes this a Transformer-XL
    compression: str = "conv"  # conv | max | mean | most_used | dilated, or one of another package
    compression_rate: int = 4
    compression_loss: str = "attention"  # attention | autoencode | none
    # time: the centre of the steps covered; contiguous: unit steps behind memory
    compressed_position: str = "time"
    compression_init: str = "mean"  # mean: a convolution starts as mean pooling; random: as torch's layers start

    RULES: ClassVar[Mapping[str, Rule]] = {
        **TransformerConfig.RULES,
        "compressed": whole_number(0, MAX_SLOTS),
        "compression_rate": whole_number(1, MAX_SLOTS),
        "compression_loss": one_of(*LOSSES),
        "compressed_position": one_of("time", "contiguous"),
        "compression_init": one_of("mean", "random"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        function = compression_function(self.compression)
        if self.compressed and function.uses_attention and self.memory < self.window:
            raise UserError(
                f"model.compression={self.compression} looks at the attention that slots receive while in memory, so "
                f"model.memory ({self.memory}) must be at least model.window ({self.window})"
            )
        if self.compressed and self.window < self.compression_rate:
            raise UserError(
                f"model.compression_rate is {self.compression_rate}, but no more than model.window={self.window} steps "
                "leave memory at once; choose a smaller rate or a larger window"
            )
        if self.compressed and self.same_length:
            raise UserError(
                "model.same_length ends what a query sees with model.memory, but model.compressed is "
                f"{self.compressed}; set model.compressed=0 or model.same_length=false"
            )

    @property
    def tracks_usage(self) -> bool:
        """Whether the compression looks at the attention that slots of memory receive."""
        return self.compressed > 0 and compression_function(self.compression).uses_attention

    @property
    def groups(self) -> int:
        """Compressed slots that a window becomes."""
        return self.window // self.compression_rate

    @property
    def windows_in_memory(self) -> int:
        """Windows of which memory holds at least a part."""
        return -(-self.memory // self.window)

    @property
    def reach(self) -> int:
        """Steps that a layer attends to before the window: M + c C, and what is dropped if c does not divide W."""
        if not self.compressed:
            return self.memory
        whole, rest = divmod(self.compressed - 1, self.groups)
        return self.memory + (whole + 1) * self.window - (self.groups - 1 - rest) * self.compression_rate

    @property
    def temporal_range(self) -> int:
        """Steps that a stack reaches back from the start of a window: L times `reach`, or L (M - 1) with `same_length`.

        Exact if W divides the reach; else layers below start from within a window, and reach up to W - 1 less or more.
        """
        return self.num_layers * (self.memory - 1 if self.same_length else self.reach)


def knows_all(known: Mapping[str, Callable[[Any], bool] | None], config: TransformerConfig) -> bool:
    """Whether a fast path that knows these fields, with values for which the function is true (None: any), fits.

    A field that is not in `known` makes it false, so that whoever adds one need not think of fast paths.
    """
    rules = [known.get(each.name, _unknown) for each in fields(config)]
    values = [getattr(config, each.name) for each in fields(config)]
    return all(rule is None or rule(value) for rule, value in zip(rules, values, strict=True))


def _unknown(_: Any) -> bool:
    return False
