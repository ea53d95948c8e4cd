"""8-bit linear PCM, the other quantiser: equal steps, for recordings whose published figures are of it."""

import torch
from torch import Tensor

from waveform.engine.sound_classes import NUM_CLASSES, OFFSET, SCALE, class_values


def encode(samples: Tensor, *, floor: bool = False) -> Tensor:
    """Quantise float samples [...], clipped to -1..1, to the nearest of 256 equal steps: classes [...] uint8.

    floor: cut the range into 256 equal classes instead (engine/sound_classes.py).
    """
    unit = (samples.detach().to(torch.float32).clamp(-1, 1) + 1) / 2
    steps = unit * SCALE + OFFSET if floor else unit * (NUM_CLASSES - 1) + 0.5
    return torch.floor(steps).to(torch.uint8)


def decode(tokens: Tensor, *, floor: bool = False) -> Tensor:
    """Turn classes [...] (any integer dtype, 0..255) into samples [...] float32 in -1..1."""
    if floor:
        return torch.from_numpy(class_values(floor=True)).float().to(tokens.device)[tokens.long()]
    return tokens.to(torch.float32) * (2 / (NUM_CLASSES - 1)) - 1
