"""Dropout that draws its masks fast on a CPU."""

import torch
from torch import Tensor, nn

_LEVELS = 2**16  # the dropped share is a multiple of 1 / _LEVELS


class Dropout(nn.Dropout):
    """As torch's; on a CPU, one random number of 64 bits serves four values, so shares are multiples of 1 / 65,536."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape; the identity in evaluation."""
        if not self.training or not self.p or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        dropped = min(round(self.p * _LEVELS), _LEVELS - 1)
        random = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        kept = (random[: x.numel()] >= dropped - _LEVELS // 2).view(x.shape)
        return x * kept * (_LEVELS / (_LEVELS - dropped))
