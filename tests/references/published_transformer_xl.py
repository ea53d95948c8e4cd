"""Transformer-XL as two public codes compute it, from tensors by their names: the oracle of `import`.

Written apart from recipes/published.py and from the other references: here nothing is converted, and the model is a few
functions of a dict of tensors. Hugging Face's `TransfoXLLMHeadModel` begins with zeros in memory and counts the head's
clusters from the first; kimiyoung's `MemTransformerLM` begins with an empty memory, has one pair of biases for all
layers, and counts the clusters from the last.

Shape letters: B rows, L steps of a segment, M memory slots, D model width, H heads, d = D / H, V words.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A small model of either code."""

    hugging_face: bool
    div_val: int = 2
    cutoffs: list[int] = field(default_factory=lambda: [8, 20, 35])
    mem_len: int = 7
    tgt_len: int = 5
    clamp_len: int = -1
    same_length: bool = False
    tied: bool = True  # tables, and projections but the first
    vocab_size: int = 50
    num_layers: int = 2
    d_model: int = 16
    num_heads: int = 2
    d_inner: int = 24

    @property
    def trunk(self) -> str:
        return "transformer." if self.hugging_face else ""

    @property
    def bounds(self) -> list[int]:
        return [0, *self.cutoffs, self.vocab_size]


def make_weights(shape: Shape, *, seed: int = 0) -> Weights:
    """Random tensors with the names and shapes that the code of `shape` saves, in fp32."""
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float = 0.3) -> Tensor:
        return std * torch.randn(*size, generator=random)

    D, H = shape.d_model, shape.num_heads
    weights = {}
    if not shape.hugging_face:
        weights |= {"r_w_bias": normal(H, D // H), "r_r_bias": normal(H, D // H)}
    for i in range(shape.num_layers):
        attention, feedforward = (f"{shape.trunk}layers.{i}.{part}." for part in ("dec_attn", "pos_ff"))
        if shape.hugging_face:
            weights |= {f"{attention}{name}": normal(H, D // H) for name in ("r_w_bias", "r_r_bias")}
        weights |= {
            f"{attention}qkv_net.weight": normal(3 * D, D),
            f"{attention}o_net.weight": normal(D, D),
            f"{attention}r_net.weight": normal(D, D),
            f"{feedforward}CoreNet.0.weight": normal(shape.d_inner, D),
            f"{feedforward}CoreNet.0.bias": normal(shape.d_inner),
            f"{feedforward}CoreNet.3.weight": normal(D, shape.d_inner),
            f"{feedforward}CoreNet.3.bias": normal(D),
        }
        for norm in (attention, feedforward):
            weights |= {f"{norm}layer_norm.weight": 1 + normal(D), f"{norm}layer_norm.bias": normal(D)}
    weights[f"{shape.trunk}pos_emb.inv_freq"] = 1 / 10000 ** (torch.arange(0.0, D, 2) / D)
    for owner in (f"{shape.trunk}word_emb.emb", "crit.out"):
        tables, projections = ("_layers", "_projs")
        if shape.div_val == 1:
            weights[f"{owner}{tables}.0.weight"] = normal(shape.vocab_size, D)
            continue
        for i, (first, last) in enumerate(pairwise(shape.bounds)):
            weights[f"{owner}{tables}.{i}.weight"] = normal(last - first, D // shape.div_val**i)
            weights[f"{owner}{projections}.{i}"] = normal(D, D // shape.div_val**i)
    sizes = [shape.vocab_size] if shape.div_val == 1 else [last - first for first, last in pairwise(shape.bounds)]
    for i, size in enumerate(sizes):
        weights[f"crit.out_layers.{i}.bias"] = normal(size)
        if shape.tied:
            weights[f"crit.out_layers.{i}.weight"] = weights[f"{shape.trunk}word_emb.emb_layers.{i}.weight"]
            if i:
                weights[f"crit.out_projs.{i}"] = weights[f"{shape.trunk}word_emb.emb_projs.{i}"]
    if shape.cutoffs:
        weights |= {
            "crit.cluster_weight": normal(len(shape.cutoffs), D),
            "crit.cluster_bias": normal(len(shape.cutoffs)),
        }
    return weights


def run(weights: Weights, shape: Shape, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [B, T] -> hidden vectors [B, T, D] and log-probabilities of the next word [B, T, V], in fp64."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    slots = shape.mem_len if shape.hugging_face else 0
    memories = [torch.zeros(len(tokens), slots, shape.d_model, dtype=torch.float64)] * shape.num_layers
    parts = []
    for segment in tokens.split(shape.tgt_len, dim=1):
        hidden = _embed(weights, shape, segment)
        for i in range(shape.num_layers):
            together = torch.cat([memories[i], hidden], 1)
            hidden = _layer(weights, shape, i, hidden, together)
            memories[i] = together[:, max(0, together.shape[1] - shape.mem_len) :]
        parts.append(hidden)
    hidden = torch.cat(parts, 1)
    return hidden, _log_probabilities(weights, shape, hidden)


def _embed(weights: Weights, shape: Shape, tokens: Tensor) -> Tensor:
    owner = f"{shape.trunk}word_emb.emb"
    if shape.div_val == 1:
        return weights[f"{owner}_layers.0.weight"][tokens] * math.sqrt(shape.d_model)
    vectors = [
        weights[f"{owner}_layers.{i}.weight"] @ weights[f"{owner}_projs.{i}"].T for i in range(len(shape.cutoffs) + 1)
    ]
    return torch.cat(vectors)[tokens] * math.sqrt(shape.d_model)


def _layer(weights: Weights, shape: Shape, i: int, hidden: Tensor, together: Tensor) -> Tensor:
    attention, feedforward = (f"{shape.trunk}layers.{i}.{part}." for part in ("dec_attn", "pos_ff"))
    mixed = _attend(weights, shape, attention, hidden, together)
    hidden = _norm(weights, attention, hidden + mixed @ weights[f"{attention}o_net.weight"].T)
    inner = hidden @ weights[f"{feedforward}CoreNet.0.weight"].T + weights[f"{feedforward}CoreNet.0.bias"]
    outer = inner.clamp(min=0) @ weights[f"{feedforward}CoreNet.3.weight"].T + weights[f"{feedforward}CoreNet.3.bias"]
    return _norm(weights, feedforward, hidden + outer)


def _norm(weights: Weights, owner: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{owner}layer_norm.weight"], weights[f"{owner}layer_norm.bias"])


def _attend(weights: Weights, shape: Shape, name: str, hidden: Tensor, together: Tensor) -> Tensor:
    (batch, length, D), total, H = hidden.shape, together.shape[1], shape.num_heads
    q, k, v = (together @ weights[f"{name}qkv_net.weight"].T).view(batch, total, 3, H, D // H).unbind(2)
    q = q[:, -length:]
    place = torch.arange(total - 1, -1, -1.0, dtype=torch.float64)
    if shape.clamp_len > 0:
        place = place.clamp(max=shape.clamp_len)
    angle = torch.outer(place, weights[f"{shape.trunk}pos_emb.inv_freq"])
    r = torch.cat([angle.sin(), angle.cos()], -1) @ weights[f"{name}r_net.weight"].T
    shared = "" if not shape.hugging_face else name
    u, w = weights[f"{shared}r_w_bias"], weights[f"{shared}r_r_bias"]
    content = torch.einsum("bihd,bjhd->bhij", q + u, k)
    position = torch.einsum("bihd,jhd->bhij", q + w, r.view(total, H, -1))
    # Row i of `position` has distances from total - 1 down to 0; its own begin at length - 1 - i places to the right.
    shifted = torch.stack([position[:, :, i].roll(-(length - 1 - i), dims=-1) for i in range(length)], 2)
    hidden_slots = torch.ones(length, total).triu(total - length + 1)
    if shape.same_length:
        too_many = total - shape.mem_len
        hidden_slots += torch.ones(length, total).tril(-(length - too_many if too_many > 0 else length))
    scores = ((content + shifted) / math.sqrt(D // H)).masked_fill(hidden_slots.bool(), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(batch, length, D)


def _log_probabilities(weights: Weights, shape: Shape, hidden: Tensor) -> Tensor:
    num_tails = len(shape.cutoffs)
    scores = []
    for i, (first, last) in enumerate(pairwise(shape.bounds)):
        if shape.div_val == 1:
            x, table = hidden, weights["crit.out_layers.0.weight"][first:last]
            bias = weights["crit.out_layers.0.bias"][first:last]
        else:
            x, table = hidden @ weights[f"crit.out_projs.{i}"], weights[f"crit.out_layers.{i}.weight"]
            bias = weights[f"crit.out_layers.{i}.bias"]
        if i == 0 and num_tails:
            table = torch.cat([table, weights["crit.cluster_weight"]])
            bias = torch.cat([bias, weights["crit.cluster_bias"]])
        scores.append((x @ table.T + bias).log_softmax(-1))
    head, num_frequent = scores[0], shape.bounds[1]
    parts = [head[..., :num_frequent]]
    for i in range(1, num_tails + 1):
        column = num_frequent + i - 1 if shape.hugging_face else num_frequent + num_tails - i
        parts.append(head[..., column, None] + scores[i])
    return torch.cat(parts, -1)
