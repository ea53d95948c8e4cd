"""Steps a CompressiveTransformer on a CPU with compiled kernels, near the speed at which memory can be read.

A step reads every weight and every cached key and value once; nothing else takes long. One compiled function takes a
whole step (step.py), or as many steps as are asked for, with the draws between them (draw.py); Python is needed once
per window, for compression.

A row's results are the same to the bit for any number of rows (dense.py) and of threads (attend_slots.py).

Shape letters: B rows, L layers, V classes, D model width, H heads, P position features, c compression rate; D', ...
padded to whole vectors.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from waveform.kernels.dense import DenseWeights, as_vectors, pad_last
from waveform.kernels.draw import NO_DRAWS, Draws, KernelDecoder
from waveform.kernels.record import address
from waveform.kernels.row_inputs import lay_out_ends, lay_out_head
from waveform.kernels.slots import Windows, caches_read, lay_out_memory
from waveform.kernels.step import CACHE_GROUPS, PHASES_PER_LAYER, PROJECT, lay_out_step, run
from waveform.models.attention import position_query
from waveform.models.compression import Convolution
from waveform.models.compressive_transformer import CompressiveTransformer, Layer
from waveform.models.memory import occupancy
from waveform.models.token_model import TokenState


class KernelTransformerDecoder(KernelDecoder):
    """Steps an fp32 CompressiveTransformer on the CPU, if its settings are known (decoding/compressive_transformer.py).

    All rows are at the same step. int8: weights and cached keys and values are kept in 8 bits, with a scale for each
    output, or slot and head.
    """

    @torch.inference_mode()
    def __init__(self, model: CompressiveTransformer, state: TokenState, *, int8: bool = False) -> None:
        config = self._config = model.config
        weights, memory = _lay_out_weights(model, int8=int8), lay_out_memory(model, state.trunk, int8=int8)
        step = lay_out_step(model.kinds, weights, memory, epsilon=model.layers[0].attention_norm.eps)
        ends, self._sound = lay_out_ends(model, state, head=weights["head"], num_rows=len(state.trunk.steps))
        self._compressors = [_lay_out_compressor(layer) for layer in model.layers]  # kept: kernels only have addresses
        convolutions = np.array([address(each) for each in self._compressors])
        fields = {**weights, "convolutions": convolutions, **ends, **memory, **step}
        super().__init__(
            fields,
            read=(*weights.values(), *caches_read(model.kinds, memory)),
            num_phases=PHASES_PER_LAYER * config.num_layers + 1,
            int8=int8,
        )
        self._num_steps = int(state.trunk.steps[0])
        self._kinds, self._windows = model.kinds, Windows(model.kinds, memory)
        self._windows.begin(self._num_steps)

    @property
    def steps_to_host(self) -> int:
        """Steps to the end of the window."""
        return self._config.window - self._num_steps % self._config.window

    def _take(self, tokens: np.ndarray, draws: Draws) -> None:
        super()._take(tokens, draws)
        if self._num_steps % self._config.window == 0:
            self._end_window()

    def _run(self, tokens: np.ndarray, draws: Draws) -> None:
        run(PROJECT, tokens, self._num_steps, draws, self._sound, self._plan, self._kind)

    def _end_window(self) -> None:
        """Compress what leaves memory."""
        end, plan = self._num_steps, self._plan
        for config, layers in self._kinds:
            before, after = occupancy(config, torch.tensor([end - config.window, end])).evicted.tolist()
            if config.compressed and after > before:
                num_kept = min(config.groups, config.compressed)
                first = end - config.window - config.memory + (config.groups - num_kept) * config.compression_rate
                plan["num_groups"], plan["first_consumed"] = num_kept, first
                plan["compressed"], plan["compression_rate"] = config.compressed, config.compression_rate
                first_slot = (after * config.groups - num_kept) % config.compressed
                run(CACHE_GROUPS, np.array(layers), first_slot, NO_DRAWS, self._sound, plan, self._kind)
        self._windows.begin(end)


def _lay_out_weights(model: CompressiveTransformer, *, int8: bool) -> dict[str, Any]:
    """The weights that every step reads, as they are now, scaled so that attention needs no 1 / sqrt(d)."""
    layers = list(model.layers)

    def dense(name: str) -> DenseWeights:
        modules = [getattr(layer, name) for layer in layers]
        return DenseWeights([module.weight for module in modules], [module.bias for module in modules], int8=int8)

    return {
        "attention_gain": as_vectors(*(layer.attention_norm.weight for layer in layers)),  # [L, D'], as the following
        "attention_bias": as_vectors(*(layer.attention_norm.bias for layer in layers)),
        "feedforward_gain": as_vectors(*(layer.feedforward_norm.weight for layer in layers)),
        "feedforward_bias": as_vectors(*(layer.feedforward_norm.bias for layer in layers)),
        "final_gain": as_vectors(model.final_norm.weight),  # [1, D']
        "final_bias": as_vectors(model.final_norm.bias),
        "projection": DenseWeights(*zip(*map(_projection, layers), strict=True), int8=int8),
        "output": DenseWeights([_output(layer) for layer in layers], int8=int8),
        "feed_in": dense("feedforward_in"),
        "feed_out": dense("feedforward_out"),
        "head": lay_out_head(cast(nn.Linear, model.head.projection), num_classes=model.config.vocab_size, int8=int8),
    }


def _lay_out_compressor(layer: Layer) -> DenseWeights:
    """The convolution that compresses, [D', c D'], in fp32; mean pooling is one with fixed weights."""
    config = layer.config
    if not config.compressed:
        return DenseWeights([torch.zeros(1, 1)], int8=False)  # kernels need an address
    if config.compression == "mean":
        mean = torch.eye(config.d_model)[:, None].expand(-1, config.compression_rate, -1) / config.compression_rate
        return DenseWeights([pad_last(mean).flatten(1)], int8=False)
    convolution = cast(Convolution, layer.compressor).convolution
    weight = pad_last(convolution.weight.transpose(1, 2)).flatten(1)
    return DenseWeights([weight], [cast(Tensor, convolution.bias)], int8=False)


def _projection(layer: Layer) -> tuple[Tensor, Tensor]:
    """Weight [3 D' + (H P)', D] and bias of q + u, k, v and the position query."""
    a = layer.attention
    d_model = a.query.weight.shape[1]
    scale = (d_model // a.num_heads) ** -0.5
    position, constant = position_query(a)
    weights = [a.query.weight * scale, a.key.weight, a.value.weight, position.flatten(0, 1) * scale]
    none = torch.zeros(d_model)
    biases = [a.content_bias.flatten() * scale, none, none, constant.flatten() * scale]
    columns = torch.cat([pad_last(weight.t()) for weight in weights], dim=1)  # [D, 3 D' + (H P)']
    return columns.t(), torch.cat([pad_last(bias) for bias in biases])


def _output(layer: Layer) -> Tensor:
    """Weight [D, H d'] of the output projection, each head's inputs padded."""
    a = layer.attention
    return pad_last(a.output.weight.unflatten(1, (a.num_heads, -1))).flatten(1)
