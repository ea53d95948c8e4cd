"""The weights of a Compressive Transformer, laid out for compiled steps.

Shape letters: L layers, V classes, D model width, H heads, P position features; D', ... padded to whole vectors.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from waveform.compiled.simd import padded
from waveform.decoding.kernels import DenseWeights, pad_last
from waveform.decoding.positions import position_query
from waveform.decoding.row_predictions import head_for_kernels
from waveform.models.compression import Convolution
from waveform.models.compressive_transformer import CompressiveTransformer, Layer
from waveform.models.heads import SoftmaxHead


class Weights(NamedTuple):
    """The weights of all layers."""

    embedding: np.ndarray  # [V + 1, D']
    attention_gain: np.ndarray  # [L, D'], as the following
    attention_bias: np.ndarray
    feedforward_gain: np.ndarray
    feedforward_bias: np.ndarray
    final_gain: np.ndarray  # [1, D']
    final_bias: np.ndarray
    projection: DenseWeights  # q, k, v and `position_query`, each padded
    output: DenseWeights
    feed_in: DenseWeights
    feed_out: DenseWeights
    head: DenseWeights


class Compressors(NamedTuple):
    """The weights of compression by convolution."""

    convolution: DenseWeights  # [L, D', c D']


def convolves(model: CompressiveTransformer) -> bool:
    """Whether a convolution compresses, which the kernels can do themselves."""
    return bool(model.config.compressed) and model.config.compression == "conv"


def lay_out_compressors(model: CompressiveTransformer) -> Compressors:
    """The convolutions that compress; just an address, which kernels need, if something else does."""
    if not convolves(model):
        return Compressors(DenseWeights([torch.zeros(1, 1)], int8=False))
    convolutions = [cast(Convolution, layer.compressor).convolution for layer in model.layers]
    weights = [pad_last(convolution.weight.transpose(1, 2)).flatten(1) for convolution in convolutions]
    biases = [cast(Tensor, convolution.bias) for convolution in convolutions]
    return Compressors(DenseWeights(weights, biases, int8=False))


def lay_out_weights(model: CompressiveTransformer, *, int8: bool) -> Weights:
    """The weights as they are now, scaled so that attention needs no 1 / sqrt(d)."""
    assert isinstance(model.head, SoftmaxHead) and isinstance(model.embedding, nn.Embedding)
    layers = list(model.layers)
    final_norm = cast(nn.LayerNorm, model.final_norm) if model.config.norm == "pre" else layers[0].attention_norm

    def vectors(of_layer: Callable[[Layer], Tensor]) -> np.ndarray:
        return _vectors([of_layer(layer) for layer in layers])

    def dense(of_layer: Callable[[Layer], Tensor], biases: Callable[[Layer], Tensor] | None = None) -> DenseWeights:
        weights = [of_layer(layer) for layer in layers]
        return DenseWeights(weights, None if biases is None else [biases(layer) for layer in layers], int8=int8)

    return Weights(
        embedding=pad_last(model.embedding.weight.detach()).clone().numpy(),
        attention_gain=vectors(lambda layer: layer.attention_norm.weight),
        attention_bias=vectors(lambda layer: layer.attention_norm.bias),
        feedforward_gain=vectors(lambda layer: layer.feedforward_norm.weight),
        feedforward_bias=vectors(lambda layer: layer.feedforward_norm.bias),
        final_gain=_vectors([final_norm.weight]),
        final_bias=_vectors([final_norm.bias]),
        projection=DenseWeights(*zip(*map(_projection, layers), strict=True), int8=int8),
        output=dense(_output),
        feed_in=dense(lambda layer: layer.feedforward_in.weight, lambda layer: layer.feedforward_in.bias),
        feed_out=dense(lambda layer: layer.feedforward_out.weight, lambda layer: layer.feedforward_out.bias),
        head=DenseWeights(
            *([each] for each in head_for_kernels(model.head.projection, model.head)), int8=int8, padding=-np.inf
        ),
    )


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


def _vectors(rows: list[Tensor]) -> np.ndarray:
    return pad_last(torch.stack([row.detach().float() for row in rows])).contiguous().numpy()
