"""Three other encodings of positions, for Transformer-XL's ablations (Dai et al. 2019, Tables 6, 7 and 10).

Its own is in waveform/models/attention.py. An encoding can act in two places: it changes the vectors that the first
layer, or every layer, reads, or it adds to the scores of a query and a slot.

Shape letters: B rows, T steps or queries, K slots, D model width, H heads, d = D / H head width, n distances.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from waveform.engine.interface import to_device
from waveform.models.attention import RelativeAttention, Slots, encode_times
from waveform.models.initial_values import INIT_STD
from waveform.models.transformer_config import CompressiveTransformerConfig

ENCODINGS = ("relative", "shaw", "absolute", "learned")


class ShawEncoding(nn.Module):
    """A learned vector for each distance and head: q . r(t_i - t_j) (Shaw et al. 2018, as Dai et al. 2019 read it).

    That is terms (a) and (b) of Transformer-XL's score, with one trained matrix in place of W_R R. Distances from
    `max_distance` - 1 on share a vector. Shaw's vectors for values are left out, as in Dai et al.
    """

    def __init__(self, d_model: int, *, num_heads: int, max_distance: int) -> None:
        super().__init__()
        # As large as the keys, beside which they are scored; the authors' code starts them at 0.02, which makes heads
        # blind to position for as long as a short training lasts (results/notes.md).
        self.vectors = nn.Parameter(torch.randn(num_heads, d_model // num_heads, max_distance))

    def logits(self, q_BHTd: Tensor, slots: Slots) -> Tensor:
        """Added to the scores [B, H, T, K] before the scale."""
        distances = slots.query_times[..., :, None] - slots.slot_times[..., None, :]
        index_BTK = distances.long().clamp(0, self.vectors.shape[-1] - 1)
        by_distance = q_BHTd @ self.vectors.to(q_BHTd.dtype)  # [B, H, T, n]
        return by_distance.gather(-1, index_BTK[:, None].expand(*q_BHTd.shape[:3], -1))


def absolute_encoding(places_BT: Tensor, *, scale: float, like: Tensor) -> Tensor:
    """Sinusoids of steps' places in their windows, added to their embeddings (Vaswani et al. 2017, section 3.5).

    With memory, slots of different windows have the same places: what section 3.3 of Dai et al. 2019 warns of. scale:
    the standard deviation of the embeddings `like` [B, T, D], so that the two begin as equals.
    """
    width = like.shape[-1] + like.shape[-1] % 2
    encoding = encode_times(to_device(places_BT, like.device), num_position_features=width, dtype=like.dtype)
    return scale * encoding[..., : like.shape[-1]]


class LearnedEncoding(nn.Module):
    """A learned vector for each place in the window, added to what its layer reads (Al-Rfou et al. 2018).

    Each layer has its own, so that positions do not fade with depth. As in `attn_type` 3 of Dai et al. 2019's code, the
    sum goes on in the residual stream.
    """

    def __init__(self, d_model: int, *, window: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(window, d_model) * INIT_STD)

    def added_to_input(self, places_BT: Tensor, *, like: Tensor) -> Tensor:
        """What is added to the vectors [B, T, D] of steps at these places of their window."""
        return nn.functional.embedding(to_device(places_BT, like.device), self.vectors).to(like.dtype)


class EncodedAttention(RelativeAttention):
    """Attention by content, with every score written out; encoding: None if positions are in the embeddings."""

    def __init__(self, config: CompressiveTransformerConfig, encoding: ShawEncoding | LearnedEncoding | None) -> None:
        super().__init__(replace(config, num_position_features=2))  # the least that is allowed; none are used
        del self.position, self.content_bias, self.position_bias
        self.encoding = encoding
        for linear in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(linear.weight)

    def content_logits(self, q_BHTd: Tensor, k_BHKd: Tensor) -> Tensor:
        """q . k -> [B, H, T, K]: no bias u, which only Transformer-XL has."""
        return q_BHTd @ k_BHKd.transpose(-1, -2)

    def position_logits(self, q_BHTd: Tensor, slots: Slots) -> Tensor:
        """-> [B, H, T, K], or a zero that is broadcast to it."""
        if isinstance(self.encoding, ShawEncoding):
            return self.encoding.logits(q_BHTd, slots)
        return q_BHTd.new_zeros(1, 1, 1, 1)
