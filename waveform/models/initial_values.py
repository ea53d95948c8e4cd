"""The values with which a Compressive Transformer begins: ours, or those of the authors' own code (DeepMind's Sonnet).

Shape letters: H heads, d head width.
"""

import math
from typing import Any

from torch import Tensor, nn

INIT_STD = 0.02  # of embeddings and heads, and of what is added to the residual stream
_CUT_STD = 0.87962566103423978  # standard deviation of a standard normal distribution truncated at -2 and 2


def initialise(model: Any) -> None:
    """Set every parameter of the trunk of a CompressiveTransformer that its modules did not set themselves."""
    config, pre_norm = model.config, model.config.norm != "post"
    if isinstance(model.embedding, nn.Embedding):
        if config.initial_values == "sonnet":  # a linear layer on one-hot vectors
            scaled_normal_(model.embedding.weight, variance=2 / model.embedding.num_embeddings)
        else:
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
    """Truncated normal weights, and Glorot-uniform attention biases, with which heads are not blind to positions."""
    attention = layer.attention
    scaled = [attention.query, attention.key, attention.value, attention.position]
    scaled += [layer.feedforward_in, layer.feedforward_out]
    biases: list[Tensor] = [attention.content_bias, attention.position_bias]
    if attention.compressed_apart:
        scaled.append(attention.compressed_position)
        biases.append(attention.compressed_position_bias)
    for module in scaled:
        scaled_normal_(module.weight, variance=2 / (math.sqrt(num_layers) * module.in_features))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    convolutions = list(layer.compressor.modules()) if layer.config.compressed else []
    for module in (attention.output, *convolutions):
        if isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d):
            std = module.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for bias in biases:
        # Theirs are [1, H, 1, d]; ours are sqrt(d) times as large, because they are added before the scale.
        num_heads, width = bias.shape
        limit = math.sqrt(6 * width / (num_heads + num_heads * width))
        nn.init.uniform_(bias, -limit, limit)


def scaled_normal_(weight: Tensor, *, variance: float) -> None:
    """Normal values truncated at two standard deviations and scaled to have `variance`, as TensorFlow draws them."""
    std = math.sqrt(variance) / _CUT_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
