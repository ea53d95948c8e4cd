"""Resamples to 24 kHz, block by block, with torchaudio's windowed sinc: in preparing, between decoding and mu-law."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import gcd

import numpy as np
import torch

from waveform.audio import SAMPLE_RATE_HZ
from waveform.audio.torchaudio_import import import_torchaudio

_BLOCK_VALUES = 1 << 20  # samples of a block before resampling, at most
_BLOCK_S = 4  # whole seconds, so that a block of any rate is a whole number of samples before and after
_ZERO_CROSSINGS, _ROLLOFF = 6, 0.99  # torchaudio's defaults
_MAX_DENSE_KERNEL = 1 << 20  # weights


class _TorchaudioKernel:
    """torchaudio's resampler, for rates whose ratio to 24 kHz is simple enough for its dense kernel.

    The kernel is computed in fp64 and then rounded: in fp32, the default, it is wrong by up to 4e-4.
    """

    def __init__(self, sample_rate_hz: int) -> None:
        divisor = gcd(sample_rate_hz, SAMPLE_RATE_HZ)
        unit_in, self._unit_out = sample_rate_hz // divisor, SAMPLE_RATE_HZ // divisor
        self._units = -(-_half_width(sample_rate_hz) // unit_in)
        self.context = self._units * unit_in
        self._resample = (
            import_torchaudio().transforms.Resample(sample_rate_hz, SAMPLE_RATE_HZ, dtype=torch.float64).float()
        )

    def __call__(self, samples: np.ndarray, *, num_out: int) -> np.ndarray:
        skip = self._units * self._unit_out
        return self._resample(torch.from_numpy(samples)).numpy()[skip : skip + num_out]


class _BandedKernel:
    """The same filter for awkward ratios (44,101 Hz), for which torchaudio's kernel would take gigabytes.

    Each of the 24,000 phases of a second keeps only the taps under its window (formula: torchaudio's
    `_get_sinc_resample_kernel`, Hann window, 6 zero crossings, roll-off 0.99; the tests compare the two).
    """

    def __init__(self, sample_rate_hz: int) -> None:
        self._rate = sample_rate_hz
        half = _half_width(sample_rate_hz)
        self.context = half + 1
        centre = np.arange(SAMPLE_RATE_HZ) * sample_rate_hz // SAMPLE_RATE_HZ  # input sample at or before each output
        self._first = centre + self.context - half  # first tap, counted from the left context
        position = np.arange(SAMPLE_RATE_HZ) * (sample_rate_hz / SAMPLE_RATE_HZ)
        taps = centre[:, None] + np.arange(-half, half + 2)
        cutoff = min(sample_rate_hz, SAMPLE_RATE_HZ) * _ROLLOFF / sample_rate_hz
        t = np.clip((taps - position[:, None]) * cutoff, -_ZERO_CROSSINGS, _ZERO_CROSSINGS)
        window = np.cos(t * np.pi / (2 * _ZERO_CROSSINGS)) ** 2
        self._weights = (np.sinc(t) * window * cutoff).astype(np.float32)

    def __call__(self, samples: np.ndarray, *, num_out: int) -> np.ndarray:
        windows = np.lib.stride_tricks.sliding_window_view(samples, self._weights.shape[1])
        out = np.empty(num_out, dtype=np.float32)
        for start in range(0, num_out, SAMPLE_RATE_HZ):
            stop = min(start + SAMPLE_RATE_HZ, num_out)
            rows = self._first[: stop - start] + start // SAMPLE_RATE_HZ * self._rate
            np.einsum("ij,ij->i", windows[rows], self._weights[: stop - start], out=out[start:stop])
        return out


def _half_width(sample_rate_hz: int) -> int:
    """Return how many input samples the filter reaches on either side."""
    return int(np.ceil(_ZERO_CROSSINGS * sample_rate_hz / (min(sample_rate_hz, SAMPLE_RATE_HZ) * _ROLLOFF)))


@lru_cache(maxsize=8)
def _resampling_kernel(sample_rate_hz: int) -> _TorchaudioKernel | _BandedKernel:
    divisor = gcd(sample_rate_hz, SAMPLE_RATE_HZ)
    dense_width = sample_rate_hz // divisor + 2 * _half_width(sample_rate_hz)
    if SAMPLE_RATE_HZ // divisor * dense_width <= _MAX_DENSE_KERNEL:
        return _TorchaudioKernel(sample_rate_hz)
    return _BandedKernel(sample_rate_hz)


def resample_blocks(pieces: Iterable[np.ndarray], *, sample_rate_hz: int) -> Iterator[np.ndarray]:
    """Resample float32 pieces [n] of one recording to 24 kHz, block by block: ceil(n * 24000 / rate) samples in all.

    The result equals resampling the whole at once, because each block is resampled together with its neighbourhood:

        recording   ........................................
        first block [zeros|   block   |right]
        next                    [left |   block   |right]
    """
    kernel = None if sample_rate_hz == SAMPLE_RATE_HZ else _resampling_kernel(sample_rate_hz)
    context = kernel.context if kernel else 0
    block_s = max(1, min(_BLOCK_S, _BLOCK_VALUES // sample_rate_hz))
    block_in, block_out = block_s * sample_rate_hz, block_s * SAMPLE_RATE_HZ
    held = [np.zeros(context, dtype=np.float32)]
    num_held = context
    for piece in pieces:
        held.append(piece)
        num_held += len(piece)
        if num_held < context + block_in + context:
            continue
        buffer = np.concatenate(held)
        while len(buffer) >= context + block_in + context:
            block = buffer[: context + block_in + context]
            yield kernel(block, num_out=block_out) if kernel else block
            buffer = buffer[block_in:]
        held, num_held = [buffer], len(buffer)
    num_left = num_held - context
    if num_left > 0:
        buffer = np.concatenate([*held, np.zeros(context, dtype=np.float32)])
        num_out = -(-num_left * SAMPLE_RATE_HZ // sample_rate_hz)
        yield kernel(buffer, num_out=num_out) if kernel else buffer
