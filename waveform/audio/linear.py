"""8-bit linear PCM, the other quantiser: equal steps, for recordings whose published figures are of it."""

import torch
from torch import Tensor

NUM_CLASSES = 256
SILENCE = 128  # the class of 0.0


def encode(samples: Tensor) -> Tensor:
    """Quantise float samples [...], clipped to -1..1, to the nearest of 256 equal steps: classes [...] uint8."""
    steps = (samples.detach().to(torch.float32).clamp(-1, 1) + 1) * ((NUM_CLASSES - 1) / 2)
    return torch.floor(steps + 0.5).to(torch.uint8)


def decode(tokens: Tensor) -> Tensor:
    """Turn classes [...] (any integer dtype, 0..255) into samples [...] float32 in -1..1."""
    return tokens.to(torch.float32) * (2 / (NUM_CLASSES - 1)) - 1
