"""The weights of a Compressive Transformer, laid out for compiled steps.

Shape letters: L layers, V classes, D model width, H heads, P position features, c compression rate; D', ... padded to
whole vectors.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from waveform.kernels.dense import DenseWeights, pad_last
from waveform.kernels.row_inputs import lay_out_head
from waveform.kernels.vectors import padded
from waveform.models.attention import position_query
from waveform.models.compression import Convolution
from waveform.models.compressive_transformer import CompressiveTransformer, Layer


def lay_out_weights(model: CompressiveTransformer, *, int8: bool) -> dict[str, Any]:
    """What every step reads, as it is now, scaled so that attention needs no 1 / sqrt(d)."""
    layers = list(model.layers)

    def vectors(*x: Any) -> np.ndarray:
        return pad_last(torch.stack([each.detach().float() for each in x])).contiguous().numpy()

    def dense(name: str) -> DenseWeights:
        modules = [getattr(layer, name) for layer in layers]
        return DenseWeights([module.weight for module in modules], [module.bias for module in modules], int8=int8)

    return {
        "attention_gain": vectors(*(layer.attention_norm.weight for layer in layers)),  # [L, D'], as the following
        "attention_bias": vectors(*(layer.attention_norm.bias for layer in layers)),
        "feedforward_gain": vectors(*(layer.feedforward_norm.weight for layer in layers)),
        "feedforward_bias": vectors(*(layer.feedforward_norm.bias for layer in layers)),
        "final_gain": vectors(model.final_norm.weight),  # [1, D']
        "final_bias": vectors(model.final_norm.bias),
        "projection": DenseWeights(*zip(*map(_projection, layers), strict=True), int8=int8),
        "output": DenseWeights([_output(layer) for layer in layers], int8=int8),
        "feed_in": dense("feedforward_in"),
        "feed_out": dense("feedforward_out"),
        "head": lay_out_head(cast(nn.Linear, model.head.projection), model.head, int8=int8),
    }


def lay_out_compressor(layer: Layer) -> DenseWeights:
    """The convolution that compresses, [D', c D'] and in fp32; mean pooling is one that does not learn."""
    config = layer.config
    if not config.compressed:
        return DenseWeights([torch.zeros(1, 1)], int8=False)  # kernels take an address
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
    padded_weights = [F.pad(weight, (0, 0, 0, padded(len(weight)) - len(weight))) for weight in weights]
    return torch.cat(padded_weights), torch.cat([pad_last(bias) for bias in biases])


def _output(layer: Layer) -> Tensor:
    """[D, H d']: each head's inputs padded."""
    a = layer.attention
    return pad_last(a.output.weight.unflatten(1, (a.num_heads, -1))).flatten(1)
