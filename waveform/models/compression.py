"""Compression functions: groups of c evicted memory slots to one compressed slot each (Rae et al. 2019, section 3.2).

Shape letters: B rows, G groups, c compression rate, D model width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from waveform.models.attention import content_attention

FUNCTIONS = ("conv", "max", "mean", "most_used", "dilated")
LOSSES = ("attention", "autoencode", "none")
_DILATIONS = (1, 2)
_DILATED_KERNEL = 3


class Compressor(nn.Module):
    """Compresses slots [B, G * c, D], oldest first, to [B, G, D].

    conv: a convolution whose kernel and stride are c. dilated: dilated convolutions, padded so that they change no
    count, before it. max, mean: pooling. most_used: the G slots that received most attention, in the order of time.
    """

    def __init__(self, d_model: int, *, function: str, rate: int, autoencode: bool) -> None:
        super().__init__()
        self.function, self.rate = function, rate
        if function == "dilated":
            self.convolutions = nn.ModuleList(
                nn.Conv1d(d_model, d_model, _DILATED_KERNEL, dilation=dilation, padding="same")
                for dilation in _DILATIONS
            )
        if function in ("conv", "dilated"):
            self.convolution = nn.Conv1d(d_model, d_model, rate, stride=rate)
        if autoencode:
            self.decoder = nn.ConvTranspose1d(d_model, d_model, rate, stride=rate)

    def forward(self, slots: Tensor, usage: Tensor | None = None) -> Tensor:
        """slots [B, G * c, D]; usage [B, G * c], average attention received, for most_used only -> [B, G, D]."""
        if self.function == "max":
            return slots.unflatten(1, (-1, self.rate)).amax(dim=2)
        if self.function == "mean":
            return slots.unflatten(1, (-1, self.rate)).mean(dim=2)
        if self.function == "most_used":
            assert usage is not None
            kept = usage.topk(slots.shape[1] // self.rate, dim=1).indices.sort(dim=1).values
            return slots.gather(1, kept[..., None].expand(-1, -1, slots.shape[-1]))
        x = slots.transpose(1, 2)
        if self.function == "dilated":
            for convolution in self.convolutions:
                x = F.relu(convolution(x))
        else:  # kernel = stride, so the convolution is one matrix product over each group
            weight = self.convolution.weight.transpose(1, 2).flatten(1)
            return F.linear(slots.unflatten(1, (-1, self.rate)).flatten(2), weight, self.convolution.bias)
        return self.convolution(x).transpose(1, 2)

    def reconstruct(self, compressed: Tensor) -> Tensor:
        """Auto-encoding only: [B, G, D] -> [B, G * c, D]."""
        return self.decoder(compressed.transpose(1, 2)).transpose(1, 2)


def attention_loss(q: Tensor, *, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """Attention reconstruction (Algorithm 2): what queries read of the new slots against what they read of the old.

    q [B, H, T, d]; old, new: keys and values [B, H, n, d] -> loss [B]. Attention is by content alone, of each head.
    Gradient reaches only `new`.
    """
    with torch.no_grad():
        target = content_attention(q, *old)
    return _mean_square_by_row(content_attention(q.detach(), *new), target)


def autoencoding_loss(compressor: Compressor, compressed: Tensor, slots: Tensor) -> Tensor:
    """How far `slots` [B, G * c, D] are from what can be reconstructed of `compressed` [B, G, D]: [B]."""
    return _mean_square_by_row(compressor.reconstruct(compressed), slots)


def _mean_square_by_row(a: Tensor, b: Tensor) -> Tensor:
    """Mean square difference over everything but the rows: [B, ...] -> [B], in at least fp32."""
    difference = (a - b).to(torch.promote_types(a.dtype, torch.float32))
    return difference.square().flatten(1).mean(dim=1)
