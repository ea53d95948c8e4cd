"""The values with which a Compressive Transformer begins: ours, or those of the authors' own code (DeepMind's Sonnet).

Shape letters: D model width, L layers, c compression rate.
"""

import math
from typing import Any

from torch import Tensor, nn

INIT_STD = 0.02  # of embeddings, and of what is added to the residual stream


def initialise(model: Any) -> None:
    """Set every parameter of the trunk of a CompressiveTransformer that its modules did not set themselves."""
    config, pre_norm = model.config, model.config.norm != "post"
    if isinstance(model.embedding, nn.Embedding):
        nn.init.normal_(model.embedding.weight, std=INIT_STD if pre_norm else 1.0)
    residual_std = INIT_STD / math.sqrt(2 * config.num_layers) if pre_norm else INIT_STD
    for i, layer in enumerate(model.layers):
        if config.initial_values == "sonnet":
            _as_sonnet(layer, num_layers=config.num_layers)
        else:
            _by_default(layer, residual_std=residual_std, local=i < int(config.local_layers * config.num_layers))


def _by_default(layer: Any, *, residual_std: float, local: bool) -> None:
    """residual_std: of the weights whose outputs are added to the residual stream; local: heads look nearby."""
    attention = layer.attention
    projections = [attention.query, attention.key, attention.value, attention.position]
    if attention.compressed_apart:
        projections.append(attention.compressed_position)
    for projection in projections:
        nn.init.xavier_uniform_(projection.weight)
    if local:
        attention.look_back()
    for projection in (attention.output, layer.feedforward_out):
        nn.init.normal_(projection.weight, std=residual_std)
    nn.init.xavier_uniform_(layer.feedforward_in.weight)
    for module in (attention.output, layer.feedforward_in, layer.feedforward_out):
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if layer.config.compressed and layer.config.compression_init == "mean":
        layer.compressor.initialise()


def _as_sonnet(layer: Any, *, num_layers: int) -> None:
    """Truncated normal weights; Glorot-uniform biases of positions, with which heads are not blind to them."""
    attention, d_model = layer.attention, layer.config.d_model
    scale = 2 / math.sqrt(num_layers)
    stds = {
        attention.query: scale / d_model,
        attention.key: scale / d_model,
        attention.value: scale / d_model,
        attention.position: scale / d_model,
        attention.output: 1 / d_model,
        layer.feedforward_in: scale / d_model,
        layer.feedforward_out: scale / layer.config.d_feedforward,
    }
    biases: list[Tensor] = [attention.content_bias, attention.position_bias]
    if attention.compressed_apart:
        stds[attention.compressed_position] = scale / d_model
        biases.append(attention.compressed_position_bias)
    convolution = getattr(getattr(layer, "compressor", None), "convolution", None)
    if convolution is not None:
        stds[convolution] = 1 / (layer.config.compression_rate * d_model)
    for module, std in stds.items():
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for bias in biases:  # ours are sqrt(d) times Sonnet's, because they are added before the scale
        nn.init.xavier_uniform_(bias)
        bias.data *= bias.shape[1] ** 0.5
