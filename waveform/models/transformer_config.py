"""The settings of models with a memory that attention reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from waveform.models.compression import compression_function
from waveform.models.model_config import MAX_LAYERS, MAX_SLOTS, MAX_WIDTH, LargeVocabularyConfig, Width
from waveform.system.errors import UserError
from waveform.system.rules import BELOW_1, Rule, one_of, whole_number

_Slots = Annotated[int, whole_number(0, MAX_SLOTS)]


def _in_layers(low: int) -> Rule:
    one = whole_number(low, MAX_SLOTS)
    return Rule(
        lambda value: all(map(one.holds, value if isinstance(value, list) else [value])),
        f"{one.remedy}, or a list with one for each layer",
    )


# One number for all layers, or a list with one for each
SlotsOfLayers = Annotated[Any, _in_layers(0)]
_OF_LAYERS = ("memory", "compressed", "compression_rate")
_EVEN = Rule(lambda value: value in range(2, MAX_WIDTH + 1, 2), f"it must be even, from 2 to {MAX_WIDTH}")
_SHARE_OF_LAYERS = Rule(lambda value: 0 <= value <= 1, "it must be a share of the layers, from 0 to 1")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


@dataclass
class TransformerConfig(LargeVocabularyConfig):
    """Fields of the trunk: attention over memory and window, regardless of what happens to evicted slots."""

    num_layers: Annotated[int, whole_number(1, MAX_LAYERS)] = 20
    d_model: Width = 384
    num_heads: Width = 6
    d_feedforward: Width = 1024
    window: Annotated[int, whole_number(1, MAX_SLOTS)] = 768  # steps that attend to each other directly
    memory: SlotsOfLayers = 768  # slots, one step each; a list: one number for each layer
    norm: Annotated[str, one_of("pre", "post", "both")] = "pre"  # pre: more stable when deep; post: as published
    attention: Annotated[str, one_of("fused", "reference")] = "fused"  # reference: the textbook form, slower
    num_position_features: Annotated[int, _EVEN] = 64  # P, width of the sinusoidal encoding
    # Share of the layers, counted from the input, whose heads start with a preference for recent steps (0, 1, 2, 4, ...
    # back); the layers above have none, so that they find what is in memory. 0: as published.
    local_layers: Annotated[float, _SHARE_OF_LAYERS] = 0.5
    # mask: empty slots are not attended to; zeros: they are zero vectors (Algorithm 1)
    empty_memory: Annotated[str, one_of("mask", "zeros")] = "mask"
    dropout: Annotated[float, BELOW_1] = 0.0

    # Settings that the weights of published Transformer-XLs need (`python -m recipes import`).

    activation: Annotated[str, one_of(*ACTIVATIONS)] = "gelu"  # gelu | relu: of the feed-forward network
    same_length: bool = False  # every query sees `memory` steps, itself included, instead of its window and all memory
    clamp_len: _Slots = 0  # steps; all larger distances are encoded as this one; 0: no limit
    attention_dropout: Annotated[float, BELOW_1] = 0.0  # of attention weights
    project_first: bool = False  # an adaptive head projects its first cluster too, with weights of its own

    # How the authors' own code differs (study=sonnet; docs/papers.md).

    # read: layers' inputs are stored in memory, and normed whenever attention reads them; stored: they are normed first
    memory_norm: Annotated[str, one_of("read", "stored")] = "read"
    final_norm: bool = True  # whether there is a norm after the last layer, unless norm=post
    output_bias: bool = False  # whether the attention's output projection has a bias
    input_activation: Annotated[str, one_of("none", "relu")] = "none"  # relu: of the sum of a token's vector and a bias
    initial_values: Annotated[str, one_of("default", "sonnet")] = "default"  # sonnet: as the authors' code draws them

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _OF_LAYERS:
            values = getattr(self, name, 0)
            if isinstance(values, list):
                if len(values) != self.num_layers:
                    num = len(values)
                    raise UserError(f"model.{name} has {num} numbers, but model.num_layers is {self.num_layers}")
                setattr(self, name, values[0] if len(set(values)) == 1 else values)
        if self.input_activation != "none" and (self.cutoffs or self.tie_embeddings):
            raise UserError(
                f"model.input_activation={self.input_activation} is for model.head=softmax without "
                "model.tie_embeddings; set model.input_activation=none"
            )
        if self.d_model % self.num_heads:
            raise UserError(f"model.d_model {self.d_model} is not a multiple of model.num_heads {self.num_heads}")
        if self.project_first and self.head != "adaptive":
            raise UserError(f"model.project_first is for model.head=adaptive, not {self.head}; leave it false")
        if self.same_length and not self.memory:
            raise UserError("model.same_length lets queries see model.memory steps, but it is 0; give it a memory")

    @property
    def is_mixed(self) -> bool:
        """Whether layers have memories of different sizes or rates."""
        return any(isinstance(getattr(self, name, 0), list) for name in _OF_LAYERS)


@dataclass
class CompressiveTransformerConfig(TransformerConfig):
    """Fields of `model=compressive_transformer`; the defaults are the 40M-parameter speech model."""

    compressed: SlotsOfLayers = 768  # slots, compression_rate steps each; 0 makes this a Transformer-XL
    compression: str = "conv"  # conv | max | mean | most_used | dilated, or one of another package
    compression_rate: Annotated[Any, _in_layers(1)] = 4  # c: steps that become one compressed slot
    # What the compressor keeps: what attention reads, the steps themselves, or, by BPTT alone, what later losses need
    compression_loss: Annotated[str, one_of("attention", "autoencode", "none")] = "attention"
    # time: the centre of the steps covered; contiguous: unit steps behind memory; window: unit steps before the window
    compressed_position: Annotated[str, one_of("time", "contiguous", "window")] = "time"
    # mean: a convolution starts as mean pooling; random: as torch's layers start
    compression_init: Annotated[str, one_of("mean", "random")] = "mean"

    # How the authors' own code differs, as above

    # own: compressed slots have their own W_R and v; shared: those of memory
    compressed_projection: Annotated[str, one_of("shared", "own")] = "shared"
    compression_bias: bool = True  # whether convolutions have biases, the auto-encoder's too; pooling has none
    compression_overlap: _Slots = 0  # steps of the next group that a group reads too
    compression_dilations: list[int] = field(default_factory=lambda: [1, 2])  # of compression=dilated, in steps
    # Whether dilated convolutions keep the number of steps; false: their kernels have 2 taps, and steps are lost
    compression_padding: bool = True
    # as_run: the compression loss also trains the key and value projections, through old slots and new ones
    compression_gradient: Annotated[str, one_of("intended", "as_run")] = "intended"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_mixed:  # the config of each kind of layer makes the checks below
            _ = self.kinds
            return
        function = compression_function(self.compression)
        if self.compressed and function.uses_attention and self.memory < max(self.window, self.compression_rate):
            raise UserError(
                f"model.compression={self.compression} looks at the attention that slots receive while in memory, so "
                f"model.memory ({self.memory}) must be at least model.window ({self.window}) and "
                f"model.compression_rate ({self.compression_rate})"
            )
        if self.compression_overlap and "overlap" not in function.options:
            raise UserError(f"model.compression_overlap is not for model.compression={self.compression}; leave it 0")
        if not self.compression_dilations or min(self.compression_dilations) < 1:
            raise UserError(f"model.compression_dilations is {self.compression_dilations}; give numbers from 1 on")
        if self.num_lost and (self.groups < 1 or self.compression_loss == "autoencode"):
            raise UserError(
                f"model.compression_padding=false loses {self.num_lost} steps, so it needs a larger model.window"
                if self.groups < 1
                else "model.compression_loss=autoencode needs all steps; set model.compression_padding=true"
            )
        if self.compressed and self.compressed_position == "window":
            if self.num_consumed > max(self.window, self.window + self.memory - 1):
                raise UserError(
                    f"model.compression_rate {self.compression_rate} and model.compression_overlap "
                    f"{self.compression_overlap} need more steps than model.memory and model.window have; lower them"
                )
        elif self.compressed and self.window < self.compression_rate + self.compression_overlap:
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
    def kinds(self) -> "list[LayerKind]":
        """Groups of neighbouring layers with the same sizes, each with a config in which every size is one number."""

        def sizes(i: int) -> dict[str, Any]:
            given = {name: getattr(self, name) for name in _OF_LAYERS}
            return {name: value[i] if isinstance(value, list) else value for name, value in given.items()}

        groups = ((size, list(layers)) for size, layers in groupby(range(self.num_layers), key=sizes))
        return [LayerKind(replace(self, **size), range(layers[0], layers[-1] + 1)) for size, layers in groups]

    @property
    def stores_normed(self) -> bool:
        """Whether memory holds what attention reads, normed, and not the layer's input."""
        return self.memory_norm == "stored" and self.norm != "post"

    @property
    def norms_when_read(self) -> bool:
        """Whether slots are normed whenever attention reads them."""
        return self.memory_norm == "read" and self.norm != "post"

    @property
    def compressed_apart(self) -> bool:
        """Whether compressed slots have a position projection and bias (W_R and v) of their own."""
        return bool(self.compressed) and self.compressed_projection == "own"

    @property
    def num_lost(self) -> int:
        """Steps of a window that dilated convolutions without padding lose."""
        unpadded = self.compression == "dilated" and not self.compression_padding
        return sum(self.compression_dilations) if unpadded else 0

    @property
    def tracks_usage(self) -> bool:
        """Whether the compression looks at the attention that slots of memory receive."""
        return bool(self.compressed) and compression_function(self.compression).uses_attention

    @property
    def groups(self) -> int:
        """Compressed slots that are made of a window."""
        one = self.compression_rate + self.compression_overlap
        return (max(self.window, one) - self.num_lost - one) // self.compression_rate + 1

    @property
    def num_consumed(self) -> int:
        """Steps that all `groups` are made of, the oldest of [memory; window]."""
        return self.groups * self.compression_rate + self.compression_overlap + self.num_lost

    @property
    def windows_in_memory(self) -> int:
        """Windows of which memory holds at least a part."""
        return -(-self.memory // self.window)

    @property
    def steps_to_full(self) -> int:
        """Steps of a fresh stream, in whole windows, after which every slot holds something."""
        if self.is_mixed:
            return max(kind.config.steps_to_full for kind in self.kinds)
        num_evicted = -(-self.compressed // self.groups) if self.compressed else 0
        return self.window * (self.windows_in_memory + num_evicted)

    @property
    def reach(self) -> int:
        """Steps before the window that a layer attends to: M + c C, and those that are dropped if c does not divide W.

        If layers differ, the most that any of them attends to.
        """
        if self.is_mixed:
            return max(kind.config.reach for kind in self.kinds)
        if not self.compressed:
            return int(self.memory)
        whole, rest = divmod(self.compressed - 1, self.groups)
        steps = 1 if self.tracks_usage else self.compression_rate  # the most used may be the first of their window
        return int(self.memory + (whole + 1) * self.window - (self.groups - 1 - rest) * steps)


class LayerKind(NamedTuple):
    """Neighbouring layers with memories of the same sizes."""

    config: CompressiveTransformerConfig  # of such a layer, with one number for each size
    layers: range
