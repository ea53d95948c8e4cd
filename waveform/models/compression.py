"""Compression functions: each turns every c evicted slots into one compressed slot (Rae et al. 2019, section 3.2).

To add one, write a subclass of `Compressor`, and one line in `FUNCTIONS` that gives it a name; or, in a package of your
own, one entry point of the group `waveform.compressions` that names the class.

Shape letters: B rows, G groups, c compression rate, n = G c slots, D model width, H heads, d head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from waveform.models.attention import content_attention
from waveform.system.errors import UserError
from waveform.system.linear_layers import linear
from waveform.system.plugins import entry_points

_GROUP = "waveform.compressions"


class Compressor(nn.Module, ABC):
    """Compresses slots; `forward` of a subclass defines how. The compression loss trains its parameters, if any."""

    uses_attention = False  # whether `forward` looks at the attention that slots received
    options: tuple[str, ...] = ()  # each NAME of a setting model.compression_NAME that `__init__` takes

    def __init__(self, d_model: int, *, rate: int, overlap: int = 0) -> None:
        """overlap: steps of the next group that a group reads too."""
        super().__init__()
        self.rate, self.kernel = rate, rate + overlap

    def initialise(self) -> None:
        """Give the parameters their initial values, if torch's are not wanted."""

    @abstractmethod
    def forward(self, slots_BnD: Tensor, usage_Bn: Tensor | None) -> Tensor:
        """n = G c slots, oldest first -> [B, G, D]. usage: average attention received, None unless `uses_attention`."""

    @property
    def has_parameters(self) -> bool:
        return next(self.parameters(), None) is not None

    def add_decoder(self, d_model: int, *, bias: bool = True) -> None:
        """Add the decoder that `reconstruct` needs, for auto-encoding."""
        self.decoder = nn.ConvTranspose1d(d_model, d_model, self.kernel, stride=self.rate, bias=bias)

    def reconstruct(self, compressed_BGD: Tensor) -> Tensor:
        """The slots [B, n, D] that were compressed, as far as the decoder can tell."""
        return self.decoder(compressed_BGD.transpose(1, 2)).transpose(1, 2)


class MaxPooling(Compressor):
    options = ("overlap",)

    def forward(self, slots_BnD: Tensor, usage_Bn: Tensor | None) -> Tensor:
        return slots_BnD.unfold(1, self.kernel, self.rate).amax(dim=-1)


class MeanPooling(Compressor):
    options = ("overlap",)

    def forward(self, slots_BnD: Tensor, usage_Bn: Tensor | None) -> Tensor:
        return slots_BnD.unfold(1, self.kernel, self.rate).mean(dim=-1)


class MostUsed(Compressor):
    """Keeps the G slots that received most attention, in the order of time."""

    uses_attention = True

    def forward(self, slots_BnD: Tensor, usage_Bn: Tensor | None) -> Tensor:
        assert usage_Bn is not None
        kept_BG = usage_Bn.topk(slots_BnD.shape[1] // self.rate, dim=1).indices.sort(dim=1).values
        return slots_BnD.gather(1, kept_BG[..., None].expand(-1, -1, slots_BnD.shape[-1]))


class Convolution(Compressor):
    """A convolution with a stride of c and a kernel of c steps, plus any overlap with the next group."""

    options = ("overlap", "bias")

    def __init__(self, d_model: int, *, rate: int, overlap: int = 0, bias: bool = True) -> None:
        super().__init__(d_model, rate=rate, overlap=overlap)
        self.convolution = nn.Conv1d(d_model, d_model, self.kernel, stride=rate, bias=bias)

    def initialise(self) -> None:
        """Start as mean pooling (the papers give no initial values), so that compressed slots are like memory's."""
        weight, bias = self.convolution.weight, self.convolution.bias
        nn.init.normal_(weight, std=1e-3)
        if bias is not None:
            nn.init.zeros_(bias)
        with torch.no_grad():
            weight += torch.eye(weight.shape[0])[..., None] / weight.shape[2]

    def forward(self, slots_BnD: Tensor, usage_Bn: Tensor | None) -> Tensor:
        # One matrix product over all groups.
        weight = self.convolution.weight
        groups_BGDk = slots_BnD.unfold(1, weight.shape[2], self.rate)
        return linear(groups_BGDk.transpose(2, 3).flatten(2), weight.transpose(1, 2).flatten(1), self.convolution.bias)


class DilatedConvolutions(Compressor):
    """Dilated convolutions, each followed by ReLU, and then a `Convolution`.

    With padding, their kernels are 3 and keep the number of slots; without, the kernels are 2, as in the authors' code,
    and each shortens its input by its dilation.
    """

    options = ("overlap", "bias", "dilations", "padding")

    def __init__(
        self,
        d_model: int,
        *,
        rate: int,
        dilations: Sequence[int],
        overlap: int = 0,
        bias: bool = True,
        padding: bool = True,
    ) -> None:
        super().__init__(d_model, rate=rate, overlap=overlap)
        kernel, pad = (3, "same") if padding else (2, "valid")
        self.convolutions = nn.ModuleList(
            nn.Conv1d(d_model, d_model, kernel, dilation=dilation, padding=pad, bias=bias) for dilation in dilations
        )
        self.convolution = nn.Conv1d(d_model, d_model, self.kernel, stride=rate, bias=bias)

    def forward(self, slots_BnD: Tensor, usage_Bn: Tensor | None) -> Tensor:
        x_BDn = slots_BnD.transpose(1, 2)
        for convolution in self.convolutions:
            x_BDn = F.relu(convolution(x_BDn))
        return self.convolution(x_BDn).transpose(1, 2)


FUNCTIONS: dict[str, type[Compressor]] = {
    "conv": Convolution,
    "max": MaxPooling,
    "mean": MeanPooling,
    "most_used": MostUsed,
    "dilated": DilatedConvolutions,
}


def compression_function(name: str) -> type[Compressor]:
    """The class of `model.compression=name`. Raises UserError for an unknown name."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    found = entry_points(group=_GROUP)
    if name not in found.names:
        raise UserError(f"model.compression is {name!r}; choose one of {', '.join([*FUNCTIONS, *sorted(found.names)])}")
    function: Any = found[name].load()
    if not (isinstance(function, type) and issubclass(function, Compressor)):
        raise UserError(f"the entry point {name!r} of the group {_GROUP} must name a subclass of Compressor")
    return function


def attention_loss(q_BHTd: Tensor, *, old: Sequence[Tensor], new: Sequence[Tensor], trains_old: bool = False) -> Tensor:
    """Attention reconstruction (Algorithm 2): mean square difference of what queries read from new and from old slots.

    old, new: keys and values, [B, H, n, d] and [B, H, G, d] -> loss [B]. Attention is by content alone, per head.
    Gradient reaches `new`, and `old` only if `trains_old`; never the queries.
    """
    q_BHTd = q_BHTd.detach()
    with torch.set_grad_enabled(trains_old and torch.is_grad_enabled()):
        target = content_attention(q_BHTd, *old)
    return _mean_square_by_row(content_attention(q_BHTd, *new), target)


def autoencoding_loss(compressor: Compressor, compressed_BGD: Tensor, slots_BnD: Tensor) -> Tensor:
    """Mean square difference between the slots and their reconstruction, which zeros fill up if it is shorter: [B]."""
    made_BnD = compressor.reconstruct(compressed_BGD)
    return _mean_square_by_row(F.pad(made_BnD, (0, 0, 0, slots_BnD.shape[1] - made_BnD.shape[1])), slots_BnD)


def _mean_square_by_row(a: Tensor, b: Tensor) -> Tensor:
    """Mean square difference over everything but the rows: [B, ...] -> [B], in at least fp32."""
    difference = (a - b).to(torch.promote_types(a.dtype, torch.float32))
    return difference.square().flatten(1).mean(dim=1)
