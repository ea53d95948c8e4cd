"""The 8-bit quantisers: between 24 kHz blocks and token shards, and between sampled tokens and WAV files.

engine/sound_classes.py defines the classes. Those of mu-law are torchaudio's (`mu_law_encoding`, mu = 255): class c
stands for the companded value 2 c / 255 - 1. Encoding looks classes up in a table for two reasons. A logarithm would be
the slowest step of preparing a corpus (1,500x real time on one core; the table 7,000x). And its last bit depends on how
the vector units cut the tensor, while the table gives a sample the same class wherever it stands in a block, so that
shards are reproducible.
"""

from functools import cache

import numpy as np
import torch

from waveform.engine.sound_classes import classes_of

_CELLS = 32_768  # table cells per unit of amplitude; the narrowest class is 5.6 cells wide
_CELL_MARGIN = 1e-6  # cells overlap by more than the rounding error of x + 1 in fp32


@cache
def _tables(quantiser: str) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return the class below each cell's boundary [cells], that boundary [cells], and the value of each class [256]."""
    classes = classes_of({"kind": "audio", "quantiser": quantiser})
    assert classes is not None
    lower_edges = (np.arange(2 * _CELLS + 1) - 0.5) / _CELLS - 1 - _CELL_MARGIN
    below = np.searchsorted(classes.bounds, lower_edges, side="right")
    boundary = np.append(classes.bounds, np.inf)[below].astype(np.float32)
    return torch.from_numpy(below.astype(np.uint8)), torch.from_numpy(boundary), np.array(classes.values, np.float32)


def encode(samples: np.ndarray, quantiser: str) -> np.ndarray:
    """Quantise a waveform: float samples [...], clipped to -1..1, become classes [...] uint8; 0.0 becomes 128.

    quantiser: its name in dataset.json. Samples must be finite (`files.read_blocks` refuses a file if they are not).
    """
    below, boundary, _ = _tables(quantiser)
    flat = torch.from_numpy(samples).float().flatten().clamp(-1, 1)
    cell = (flat * _CELLS).add_(_CELLS + 0.5).int()
    # index_select, because `take` and indexing take 2 and 6 times as long; numpy compares in a seventh of torch's time.
    is_above = torch.from_numpy(flat.numpy() >= boundary.index_select(0, cell).numpy())
    return below.index_select(0, cell).add_(is_above).view(samples.shape).numpy()


def decode(tokens: np.ndarray, quantiser: str) -> np.ndarray:
    """Turn classes [...] (any integer dtype, 0..255) into samples [...] float32 in -1..1."""
    _, _, values = _tables(quantiser)
    return values[tokens]
