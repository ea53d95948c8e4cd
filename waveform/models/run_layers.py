"""How the layers of a Compressive Transformer run: one by one with torch, or all at once in kernels.

Settings, sizes and the device decide which, here and nowhere else. Torch runs whatever the kernels do not know
(`KERNELS`).

Shape letters: B rows, T steps, e window slots in use, M memory slots, C compressed slots, G new compressed slots, D
model width, L layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from waveform.engine.interface import OptionalParts
from waveform.engine.known_settings import KnownSettings
from waveform.models import memory
from waveform.models.attention import VECTOR, AttentionOutput
from waveform.models.memory import Clock, CompressiveState
from waveform.models.transformer_config import CompressiveTransformerConfig, LayerKind
from waveform.system.errors import UserError

_MIN_QUERIES = 8  # queries of a call from which kernels are faster
_MAX_WEIGHTS = 2**18  # attention weights of a row and layer, which kernels keep; with more, torch is as fast


# Fields that every fast path knows, whatever their value
KNOWN_TO_ALL = (
    *("vocab_size", "num_layers", "d_model", "num_heads", "d_feedforward", "num_position_features", "num_labels"),
    *("window", "memory", "compressed", "compression_rate", "compression_dilations"),
    *("initial_values", "local_layers", "dropout", "compression_loss", "compression_gradient", "compression_init"),
    *("cutoffs", "div_value", "classes", "prediction_widening"),  # details of `head` and `prediction`
)
# Fields by which the authors' own code differs within a layer: every fast path knows only their defaults.
AS_PUBLISHED = (
    *("memory_norm", "output_bias", "compressed_projection"),
    *("compression_bias", "compression_overlap", "compression_padding"),
)
_AT_DEFAULT = ("norm", "attention", "activation", "same_length", "clamp_len", "attention_dropout", *AS_PUBLISHED)
_AROUND = ("head", "tie_embeddings", "project_first", "prediction", "final_norm", "input_activation")
# Known to the kernels of whole layers. Torch computes what comes before the layers and after them.
KERNELS = KnownSettings(
    (*KNOWN_TO_ALL, "compression", "compressed_position", "empty_memory", *_AROUND), dict.fromkeys(_AT_DEFAULT, ())
)


class LayersOutput(NamedTuple):
    """What the layers of one kind compute in a call within a window."""

    h: Tensor  # [B, T, D]
    window: Tensor  # [B, L, e, D] inputs of the layers, the new steps included
    groups: Tensor | None  # [B, L, G, D] of the evicted steps; None if nothing is evicted
    usage: Tensor  # [B, L, M] or [B, L, 0]
    loss: Tensor | None  # [B] compression loss, summed over the layers


class RunsLayers(OptionalParts):
    """What a CompressiveTransformer offers the engine about how its layers run."""

    config: CompressiveTransformerConfig
    kinds: Sequence[LayerKind]
    layers: Sequence[Any]  # `Layer` of models/compressive_transformer.py
    training: bool
    checkpoint_activations: bool | None = False
    _compiles = False

    def run_layers(
        self, h_BTD: Tensor, state: CompressiveState, clocks: Sequence[Clock]
    ) -> tuple[Tensor, CompressiveState, Tensor | None]:
        """Run every layer in turn, in the fastest way that knows it and this call; clocks: one per kind of layer.

        Returns the last layer's output [B, T, D], the state after the call, and the compression loss [B], a mean over
        the layers.
        """
        parts, losses = [], []
        for kind, clock in zip(self.kinds, clocks, strict=True):
            layers, before = [self.layers[i] for i in kind.layers], memory.part_of(kind, state)
            run = _by_kernels if self._takes_kernels(h_BTD, clock) else _by_torch
            made = run(self, layers, h_BTD, before, clock)
            h_BTD = made.h
            parts.append(memory.after_call(kind.config, before, made.window, made.groups, made.usage, clock))
            losses += [] if made.loss is None else [made.loss]
        loss_B = torch.stack(losses).sum(dim=0) / len(self.layers) if losses else None
        return h_BTD, memory.joined(parts, like=state), loss_B

    def run_one(self, clock: Clock) -> Callable[..., Any]:
        """How a layer runs its step: as it is, with activation checkpointing, or by torch.compile."""
        step = type(self.layers[0]).step
        if not torch.is_grad_enabled():
            return step
        if self._compiles and clock.is_steady(self.kinds[0].config) and not is_in_torch_dispatch_mode():
            step = compiled_step(step)
        if self.checkpoint_activations:
            dropout = self.config.dropout > 0 or self.config.attention_dropout > 0
            return functools.partial(checkpoint, step, use_reentrant=False, preserve_rng_state=dropout)
        return step

    def sharding_units(self, window: int) -> list[nn.Module]:
        """The layers; none if neither `window` nor the model's window is a multiple of the other.

        The number of parts that a call is cut into would then depend on the phases of its rows, and differ by rank.
        """
        own = self.config.window
        return list(self.layers) if not (window % own and own % window) else []

    def compile_layers(self, window: int) -> bool:
        """As `OptionalParts.compile_layers`; only steady windows of training (`Clock.is_steady`) run compiled."""
        config = self.config
        if config.attention != "fused" or config.tracks_usage or config.is_mixed or window % config.window:
            raise UserError(
                "train.compile=true compiles whole windows of layers alike: it needs model.attention=fused (here "
                f"{config.attention}), a model.compression that does not look at attention weights (here "
                f"{config.compression}), memories of one size for all layers, and train.window ({window}) a multiple "
                f"of model.window ({config.window}); change these, or leave it false"
            )
        self._compiles = True
        return True

    @property
    def has_own_threads(self) -> bool:
        """True if there are kernels for its sizes, as for all small models, and nothing keeps its layers from them."""
        recomputes = bool(self.checkpoint_activations) and torch.is_grad_enabled()
        sharded = type(self.layers[0].attention_norm.weight) is not nn.Parameter
        return self.has_kernels and not (self._compiles or recomputes or sharded)

    def prepare_kernels(self) -> None:
        """Compile the kernels of small models, which takes some 15 s unless they are on disk, or those of attention."""
        if self._compiles or self.config.attention != "fused":
            return
        if self.has_kernels:  # evaluations run in them even if no training step does
            from waveform.kernels.layers_op import compile_kernels  # here, to load numba only if it is used
        elif self.config.d_model // self.config.num_heads % VECTOR == 0:
            from waveform.kernels.attention import compile_kernels
        else:
            return
        compile_kernels()

    @functools.cached_property
    def has_kernels(self) -> bool:
        """Whether there are kernels for it: widths of whole vectors, and not too many attention weights."""
        config = self.config
        widths = (config.d_model, config.d_model // config.num_heads, config.d_feedforward)
        if not KERNELS.supports(config):
            return False
        num_slots = config.window + max(kind.config.compressed + kind.config.memory for kind in self.kinds)
        few = config.num_heads * config.window * num_slots <= _MAX_WEIGHTS
        return not config.tracks_usage and few and all(width % VECTOR == 0 for width in widths)

    def _takes_kernels(self, h_BTD: Tensor, clock: Clock) -> bool:
        """Whether kernels can run the layers, and are the faster way."""
        return (
            self.has_own_threads
            and h_BTD.device.type == "cpu"
            and h_BTD.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and clock.num_new >= _MIN_QUERIES
            and clock.slots.visible is None
            and not self.carry_gradient
            and not any(module._forward_hooks for module in (self.layers[0], self.layers[0].attention))
            and not is_in_torch_dispatch_mode()  # a FLOP counter would not see kernels
        )


@functools.cache
def compiled_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's step by torch.compile: compiled once for all layers, for each of the few shapes of steady calls."""
    return torch.compile(step, dynamic=False)


def _by_torch(
    model: RunsLayers, layers: Sequence[Any], h_BTD: Tensor, state: CompressiveState, clock: Clock
) -> LayersOutput:
    """One by one; state: of these layers."""
    run, outputs = model.run_one(clock), []
    for i, layer in enumerate(layers):
        made = layer(h_BTD, state.slots[:, i], state.window[:, i], state.usage[:, i], clock, run)
        h_BTD = made.h
        outputs.append(made)
    inputs = [made.read if model.carry_gradient else made.read.detach() for made in outputs]
    groups = [made.groups for made in outputs if made.groups is not None]
    losses = [made.loss for made in outputs if made.loss is not None]
    return LayersOutput(
        h_BTD,
        memory.write_window(state.window, torch.stack(inputs, dim=1), clock),
        torch.stack(groups, dim=1) if groups else None,
        torch.stack([made.usage for made in outputs], dim=1),
        torch.stack(losses).sum(dim=0) if losses else None,
    )


def _by_kernels(
    model: RunsLayers, layers: Sequence[Any], h_BTD: Tensor, state: CompressiveState, clock: Clock
) -> LayersOutput:
    """All of them in one call; state: of these layers."""
    from waveform.kernels.layers_op import layers_in_kernels  # here, to load numba only if it is used

    config: CompressiveTransformerConfig = layers[0].config
    pasts = [memory.attended_slots(config, state.slots[:, i], state.window[:, i], clock) for i in range(len(layers))]
    made = layers_in_kernels(layers, h_BTD, pasts, clock.slots, _compression(config, clock))
    window = memory.write_window(state.window, made.inputs.transpose(0, 1), clock)
    groups = None if made.groups is None else made.groups.transpose(0, 1)
    loss = None if made.losses is None else made.losses.sum(dim=0)
    if config.compressed and clock.evicts is not False and groups is None:  # by torch, from what the kernels have kept
        groups, loss = compress_layers(layers, state, window, clock, made.attended)
    return LayersOutput(made.out, window, groups, state.usage, loss)


def compress_layers(
    layers: Sequence[Any],
    state: CompressiveState,
    window: Tensor,
    clock: Clock,
    attended: Sequence[AttentionOutput] | None,
) -> tuple[Tensor, Tensor | None]:
    """Compress the evicted steps in all layers -> [B, L, G, D], and the sum over layers of their loss [B].

    window [B, L, W, D]: the finished window. attended: of each layer, for the loss; None: no loss is computed.
    """
    made = [
        layer.compress(state.slots[:, i], window[:, i], state.usage[:, i], clock, attended[i] if attended else None)
        for i, layer in enumerate(layers)
    ]
    losses = [loss for _, loss in made if loss is not None]
    return torch.stack([groups for groups, _ in made], dim=1), torch.stack(losses).sum(dim=0) if losses else None


def _compression(config: CompressiveTransformerConfig, clock: Clock) -> dict[str, int]:
    """Arguments of kernels that compress at the end of a call; empty if nothing is compressed, or torch does it."""
    known = config.compression == "conv" and config.compression_loss == "attention"
    known = known and config.compression_gradient == "intended" and config.num_consumed <= config.memory
    if not config.compressed or clock.evicts is False or clock.num_new != config.window or not known:
        return {}
    return {"rate": config.compression_rate, "num_groups": config.groups, "first_consumed": clock.num_compressed}
