"""Transformer-XL as published (Dai et al. 2019): segment recurrence, and the relative shift of Appendix B.

Written independently of the Compressive Transformer's reference, so that the two can check each other: here a
segment is one matrix, position terms come from one table of distances, and a padded reshape aligns them.

Shape letters: B rows, L steps of a segment, M memory slots before it, D model width, H heads, d = D / H, P position
features.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def run(model: Any, config: Any, tokens: Tensor) -> Tensor:
    """tokens [B, T] of fresh streams -> hidden [B, T, D]; no gradient crosses a segment's start."""
    memories = [torch.zeros(len(tokens), 0, config.d_model, dtype=model.embedding.weight.dtype) for _ in model.layers]
    outputs = []
    for segment in tokens.split(config.window, dim=1):
        hidden = F.embedding(segment, model.embedding.weight)
        for i, layer in enumerate(model.layers):
            together = torch.cat([memories[i], hidden], 1)
            hidden = _layer(layer, config, hidden, together)
            memories[i] = together[:, max(0, together.shape[1] - config.memory) :].detach()
        outputs.append(_norm(model.final_norm, hidden) if config.norm == "pre" else hidden)
    return torch.cat(outputs, 1)


def _layer(layer: Any, config: Any, hidden: Tensor, together: Tensor) -> Tensor:
    if config.norm == "pre":
        queries, slots = _norm(layer.attention_norm, hidden), _norm(layer.attention_norm, together)
        hidden = hidden + _attention(layer.attention, config, queries, slots)
        return hidden + _feedforward(layer, config, _norm(layer.feedforward_norm, hidden))
    hidden = _norm(layer.attention_norm, hidden + _attention(layer.attention, config, hidden, together))
    return _norm(layer.feedforward_norm, hidden + _feedforward(layer, config, hidden))


def _attention(attention: Any, config: Any, queries: Tensor, slots: Tensor) -> Tensor:
    """queries [B, L, D], slots [B, M + L, D] -> [B, L, D]."""
    length, total = queries.shape[1], slots.shape[1]
    q = _heads(queries @ attention.query.weight.T, config)
    k = _heads(slots @ attention.key.weight.T, config)
    v = _heads(slots @ attention.value.weight.T, config)
    # Row n of R is the distance M + L - 1 - n; Q~ = R W_R^T, one row for every distance that occurs.
    r = _distances(total, config, like=queries) @ attention.position.weight.T
    r = r.view(total, config.num_heads, -1).transpose(0, 1)  # [H, M + L, d]
    content = (q + attention.content_bias[:, None]) @ k.transpose(-1, -2)
    position = _shift((q + attention.position_bias[:, None]) @ r.transpose(-1, -2))
    scores = (content + position) / math.sqrt(q.shape[-1])
    unseen = torch.ones(length, total, dtype=torch.bool).triu(total - length + 1)
    if config.same_length:
        unseen |= torch.ones(length, total, dtype=torch.bool).tril(total - length - config.memory)
    weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ attention.output.weight.T


def _distances(total: int, config: Any, *, like: Tensor) -> Tensor:
    """R for the distances total - 1 down to 0 [total, P]: sines, then cosines."""
    half = torch.arange(0, config.num_position_features, 2, dtype=like.dtype)
    frequencies = 1 / 10000 ** (half / config.num_position_features)
    distances = torch.arange(total - 1, -1, -1, dtype=like.dtype)
    if config.clamp_len:
        distances = distances.clamp(max=config.clamp_len)
    angles = torch.outer(distances, frequencies)
    return torch.cat([angles.sin(), angles.cos()], -1)


def _shift(scores: Tensor) -> Tensor:
    """[B, H, L, M + L] by (query, row of R) -> by (query, slot), for the slots that the query may see."""
    batch, heads, length, total = scores.shape
    padded = torch.cat([scores.new_zeros(batch, heads, length, 1), scores], -1)
    return padded.view(batch, heads, total + 1, length)[:, :, 1:].reshape(batch, heads, length, total)


def _heads(vectors: Tensor, config: Any) -> Tensor:
    """[B, N, D] -> [B, H, N, d]."""
    return vectors.unflatten(-1, (config.num_heads, -1)).transpose(1, 2)


def _feedforward(layer: Any, config: Any, hidden: Tensor) -> Tensor:
    inner = hidden @ layer.feedforward_in.weight.T + layer.feedforward_in.bias
    inner = inner.clamp(min=0) if config.activation == "relu" else F.gelu(inner)
    return inner @ layer.feedforward_out.weight.T + layer.feedforward_out.bias


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    return F.layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
