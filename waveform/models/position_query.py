"""The position term of attention when keys are kept: one complex product per query, instead of a shifted score matrix.

With (q + v)^T W_R split into sine and cosine halves a_s and a_c, and frequencies w, the term for a query at time t and
a slot at time s is the real part of (a_c - i a_s) e^{i w t} e^{-i w s}, summed over w
(see `rotate_to_time`). The first factor is linear in the layer's input, so it joins the projection to queries.

Shape letters: H heads, P position features, D model width.
"""

import torch
from torch import Tensor

from waveform.models.attention import RelativeAttention, frequencies


def position_query(attention: RelativeAttention) -> tuple[Tensor, Tensor]:
    """(q + v)^T W_R of an input x [D] as weight x + constant: weight [H, P, D] and constant [H, P].

    Each head's features are a_c, then -a_s.
    """
    d_head = attention.query.weight.shape[0] // attention.num_heads
    w_r = attention.position.weight.view(attention.num_heads, d_head, -1)
    w_q = attention.query.weight.view(attention.num_heads, d_head, -1)
    weight = torch.einsum("hdp,hdm->hpm", w_r, w_q)
    constant = torch.einsum("hdp,hd->hp", w_r, attention.position_bias)
    return _cosines_first(weight), _cosines_first(constant)


def _cosines_first(x: Tensor) -> Tensor:  # [H, P, ...]: [a_s; a_c] -> [a_c; -a_s]
    sine, cosine = x.chunk(2, dim=1)
    return torch.cat([cosine, -sine], dim=1)


def angles(times: Tensor, *, num_position_features: int) -> Tensor:
    """times [..., n] in fp64 -> w t [..., n, P / 2].

    A model in fp32 rounds w and w t in `forward`; these are exact, and their cosines and sines are rounded once.
    """
    return times[..., None] * frequencies(num_position_features, device=times.device)
