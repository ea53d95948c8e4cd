"""Resamples to the rate of a data set, block by block, with torchaudio's windowed sinc: after decoding a file."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.metadata import requires
from math import gcd
from types import ModuleType

import numpy as np
import torch

from waveform.system.errors import UserError

_BLOCK_VALUES = 1 << 20  # most samples of a block before resampling
_BLOCK_S = 4  # whole seconds, so that a block of any rate is a whole number of samples before and after
_ZERO_CROSSINGS, _ROLLOFF = 6, 0.99  # torchaudio's defaults
_MAX_DENSE_KERNEL = 1 << 20  # weights


def import_torchaudio() -> ModuleType:
    """Import torchaudio with its `transforms`.

    Raises UserError if it is missing or was built for a different torch: its library then fails to load, with an
    OSError or a RuntimeError that names symbols.
    """
    try:
        import torchaudio.transforms
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        versions = " ".join(f'"{each}"' for each in requires("waveform") or () if each.startswith("torch"))
        raise UserError(
            f"torchaudio cannot be imported ({reason}); install torch and torchaudio together: pip install {versions}"
        ) from error
    return torchaudio


class _TorchaudioKernel:
    """torchaudio's resampler, for rates whose ratio is simple enough for its dense kernel.

    The kernel is computed in fp64 and then rounded: in fp32, the default, it is wrong by up to 4e-4.
    """

    def __init__(self, from_hz: int, to_hz: int) -> None:
        divisor = gcd(from_hz, to_hz)
        unit_in, self._unit_out = from_hz // divisor, to_hz // divisor
        self._units = -(-_half_width(from_hz, to_hz) // unit_in)
        self.context = self._units * unit_in
        self._resample = import_torchaudio().transforms.Resample(from_hz, to_hz, dtype=torch.float64).float()

    def __call__(self, samples: np.ndarray, *, num_out: int) -> np.ndarray:
        skip = self._units * self._unit_out
        return self._resample(torch.from_numpy(samples)).numpy()[skip : skip + num_out]


class _BandedKernel:
    """The same filter for awkward ratios (44,101 Hz), for which torchaudio's kernel would take gigabytes.

    Each of the `to_hz` phases keeps only the taps inside its window (formula: torchaudio's
    `_get_sinc_resample_kernel`, Hann window, 6 zero crossings, roll-off 0.99; the tests compare the two).
    """

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._from_hz, self._to_hz = from_hz, to_hz
        half = _half_width(from_hz, to_hz)
        self.context = half + 1
        centre = np.arange(to_hz) * from_hz // to_hz  # input sample at or before each output
        self._first = centre + self.context - half  # first tap, counted from the left context
        position = np.arange(to_hz) * (from_hz / to_hz)
        taps = centre[:, None] + np.arange(-half, half + 2)
        cutoff = min(from_hz, to_hz) * _ROLLOFF / from_hz
        t = np.clip((taps - position[:, None]) * cutoff, -_ZERO_CROSSINGS, _ZERO_CROSSINGS)
        window = np.cos(t * np.pi / (2 * _ZERO_CROSSINGS)) ** 2
        self._weights = (np.sinc(t) * window * cutoff).astype(np.float32)

    def __call__(self, samples: np.ndarray, *, num_out: int) -> np.ndarray:
        windows = np.lib.stride_tricks.sliding_window_view(samples, self._weights.shape[1])
        out = np.empty(num_out, dtype=np.float32)
        for start in range(0, num_out, self._to_hz):
            stop = min(start + self._to_hz, num_out)
            rows = self._first[: stop - start] + start // self._to_hz * self._from_hz
            np.einsum("ij,ij->i", windows[rows], self._weights[: stop - start], out=out[start:stop])
        return out


def _half_width(from_hz: int, to_hz: int) -> int:
    """Return how many input samples the filter reaches on either side."""
    return int(np.ceil(_ZERO_CROSSINGS * from_hz / (min(from_hz, to_hz) * _ROLLOFF)))


@lru_cache(maxsize=8)
def _resampling_kernel(from_hz: int, to_hz: int) -> _TorchaudioKernel | _BandedKernel:
    divisor = gcd(from_hz, to_hz)
    dense_width = from_hz // divisor + 2 * _half_width(from_hz, to_hz)
    if to_hz // divisor * dense_width <= _MAX_DENSE_KERNEL:
        return _TorchaudioKernel(from_hz, to_hz)
    return _BandedKernel(from_hz, to_hz)


def resample_blocks(pieces: Iterable[np.ndarray], *, from_hz: int, to_hz: int) -> Iterator[np.ndarray]:
    """Resample float32 pieces [n] of one recording, block by block: ceil(n * to_hz / from_hz) samples in all.

    The result equals resampling the whole at once, because each block is resampled together with its neighbourhood:

        recording   ........................................
        first block [zeros|   block   |right]
        next                    [left |   block   |right]
    """
    kernel = None if from_hz == to_hz else _resampling_kernel(from_hz, to_hz)
    context = kernel.context if kernel else 0
    block_s = max(1, min(_BLOCK_S, _BLOCK_VALUES // from_hz))
    block_in, block_out = block_s * from_hz, block_s * to_hz
    buffer = np.zeros(context, dtype=np.float32)
    for piece in pieces:
        buffer = np.concatenate([buffer, piece])
        while len(buffer) >= context + block_in + context:
            block = buffer[: context + block_in + context]
            yield kernel(block, num_out=block_out) if kernel else block
            buffer = buffer[block_in:]
    num_left = len(buffer) - context
    if num_left > 0:
        buffer = np.concatenate([buffer, np.zeros(context, dtype=np.float32)])
        num_out = -(-num_left * to_hz // from_hz)
        yield kernel(buffer, num_out=num_out) if kernel else buffer
