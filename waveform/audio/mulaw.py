"""8-bit mu-law: the quantiser between 24 kHz blocks and token shards, and between sampled tokens and WAV files.

The classes are torchaudio's (`mu_law_encoding`, mu = 255): class c stands for the companded value 2 c / 255 - 1.
Encoding goes through a table for two reasons. torchaudio's logarithm would be the slowest step of preparing a corpus
(1,500x real time on one core; the table 7,000x). And its last bit depends on how the vector units cut the tensor, while
the table gives a sample the same class wherever it stands in a block, so that shards are reproducible.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from waveform.audio import floor_classes
from waveform.audio.torchaudio_import import import_torchaudio

NUM_CLASSES = 256
SILENCE = 128  # the class of 0.0

_MU = NUM_CLASSES - 1
_CELLS = 32_768  # table cells per unit of amplitude; the narrowest class is 5.6 cells wide
_CELL_MARGIN = 1e-6  # cells overlap by more than x + 1 is rounded in fp32


@cache
def _tables(floor: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the class below each cell's boundary [cells], that boundary [cells], and the value of each class [256]."""
    if floor:
        companded = floor_classes.boundaries()
        values = torch.from_numpy(_expand(floor_classes.centres()))
    else:
        # torchaudio rounds the companded value to the nearest class, so classes c - 1 and c meet at (2 c - 1) / mu - 1.
        companded = (2 * np.arange(1, NUM_CLASSES) - 1) / _MU - 1
        values = import_torchaudio().functional.mu_law_decoding(torch.arange(NUM_CLASSES), NUM_CLASSES)
    boundaries = _expand(companded)
    lower_edges = (np.arange(2 * _CELLS + 1) - 0.5) / _CELLS - 1 - _CELL_MARGIN
    below = np.searchsorted(boundaries, lower_edges, side="right")
    boundary = np.append(boundaries, np.inf)[below]
    return torch.from_numpy(below.astype(np.uint8)), torch.from_numpy(boundary.astype(np.float32)), values.float()


def _expand(companded: np.ndarray) -> np.ndarray:
    """Companded values in -1..1, fp64 -> amplitudes in -1..1, fp64."""
    return np.sign(companded) * np.expm1(np.abs(companded) * np.log1p(_MU)) / _MU


def encode(samples: Tensor, *, floor: bool = False) -> Tensor:
    """Quantise a waveform: float samples [...], clipped to -1..1, become classes [...] uint8; 0.0 becomes 128.

    floor: cut the companded range into 256 equal classes instead of rounding to the nearest of 256 values
    (waveform/audio/floor_classes). Samples must be finite (`files.read_blocks` refuses a file if they are not).
    """
    below, boundary, _ = (table.to(samples.device) for table in _tables(floor))
    flat = samples.detach().to(torch.float32).flatten().clamp(-1, 1)
    cell = (flat + 1).mul_(_CELLS).add_(0.5).int()
    # index_select, because `take` and indexing cost two and six times as much.
    classes = below.index_select(0, cell).add_(flat >= boundary.index_select(0, cell))
    return classes.view(samples.shape)


def decode(tokens: Tensor, *, floor: bool = False) -> Tensor:
    """Turn classes [...] (any integer dtype, 0..255) into samples [...] float32 in -1..1."""
    _, _, values = _tables(floor)
    return values.to(tokens.device)[tokens.long()]
