"""Audio files: any common format in, as mono 24 kHz blocks; 16-bit WAV out, playable at every moment.

Reading: decode block-wise, judge and average the channels (`decoding`, in a process of its own) -> resample
(torchaudio's windowed sinc) -> blocks of whole seconds. Memory does not depend on the length of the file.
"""

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from math import gcd
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from waveform.audio.decoding_child import END, HEADER, REFUSED, RefusedFile, check_regular
from waveform.audio.decoding_process import Decoder, take_decoder
from waveform.audio.torchaudio_import import import_torchaudio
from waveform.system.atomic import drop_leftovers, explain_write_errors
from waveform.system.errors import UserError

SAMPLE_RATE_HZ = 24_000
AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif"})

_BLOCK_VALUES = 1 << 20  # samples of a block before resampling, at most
_BLOCK_S = 4  # whole seconds: then every rate has a whole number of samples per block, before and after resampling


def is_audio_name(name: str) -> bool:
    """Whether a file name ends like audio that this toolkit reads."""
    return os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES


class AudioFile:
    """One audio file, opened for one pass of reading; a context manager.

    `blocks()` yields mono float32 [n] at 24 kHz. The counters are right when it has ended. A process of its own decodes
    (see `decoding`), so that no file can end this one. Raises RefusedFile, on opening or while reading, for whatever
    cannot be trusted: damaged, cut short, empty, not finite, absurd rates; DecoderDied for what ends the decoder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._before = check_regular(path)
        if self._before.st_size == 0:
            raise RefusedFile(path, "it is empty (0 bytes)")
        self.num_frames = 0  # at the file's own rate
        self.num_clipped = 0  # samples of any channel, before mixing, with |x| >= CLIPPED_AMPLITUDE
        self._decoder: Decoder | None = take_decoder()
        try:
            self._decoder.open(path)
            kind, content = self._receive()
            assert kind == HEADER
            self.sample_rate_hz, self.num_channels = (int(number) for number in content)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "AudioFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; a decoder that is still at work on it is ended."""
        if self._decoder is not None:
            self._decoder.kill()
            self._decoder = None

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield mono float32 blocks [n] at 24 kHz; each but the last is a whole number of seconds."""
        yield from resample_blocks(self._pieces(), sample_rate_hz=self.sample_rate_hz)

    def _receive(self) -> tuple[bytes, Any]:
        """The next message about this file. Raises RefusedFile where it is a refusal."""
        assert self._decoder is not None
        kind, content = self._decoder.receive(self.path)
        if kind in (END, REFUSED):
            self._decoder.give_back()
            self._decoder = None
        if kind == REFUSED:
            raise RefusedFile(self.path, content)
        return kind, content

    def _pieces(self) -> Iterator[np.ndarray]:
        """Yield mono float32 pieces at the file's own rate."""
        while True:
            kind, content = self._receive()
            if kind == END:
                break
            yield content
        self.num_frames, self.num_clipped = content
        after = check_regular(self.path)
        if (after.st_size, after.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            raise RefusedFile(self.path, "it changed while it was read; prepare again when it is complete")


class _TorchaudioKernel:
    """torchaudio's resampler, for rates whose ratio to 24 kHz is neat enough for its dense kernel.

    The kernel is computed in fp64 and then rounded: computed in fp32, as by default, it is wrong by up to 4e-4.
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
    """The same filter for awkward ratios (44,101 Hz), where torchaudio's kernel would take gigabytes.

    Each of the 24,000 phases of a second keeps only the taps under its window (formula: torchaudio's
    `_get_sinc_resample_kernel`, Hann window, 6 zero crossings, roll-off 0.99; the tests compare the two).
    """

    def __init__(self, sample_rate_hz: int) -> None:
        self._rate = sample_rate_hz
        half = _half_width(sample_rate_hz)
        self.context = half + 1
        centre = np.arange(SAMPLE_RATE_HZ) * sample_rate_hz // SAMPLE_RATE_HZ  # input sample at or before each output
        self._first = centre + self.context - half  # first tap, where the input starts with the left context
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


_ZERO_CROSSINGS, _ROLLOFF = 6, 0.99  # torchaudio's defaults
_MAX_DENSE_KERNEL = 1 << 20  # weights


def _half_width(sample_rate_hz: int) -> int:
    """Input samples that the filter reaches to either side."""
    return int(np.ceil(_ZERO_CROSSINGS * sample_rate_hz / (min(sample_rate_hz, SAMPLE_RATE_HZ) * _ROLLOFF)))


@lru_cache(maxsize=8)
def _resampling_kernel(sample_rate_hz: int) -> _TorchaudioKernel | _BandedKernel:
    divisor = gcd(sample_rate_hz, SAMPLE_RATE_HZ)
    dense_width = sample_rate_hz // divisor + 2 * _half_width(sample_rate_hz)
    if SAMPLE_RATE_HZ // divisor * dense_width <= _MAX_DENSE_KERNEL:
        return _TorchaudioKernel(sample_rate_hz)
    return _BandedKernel(sample_rate_hz)


def resample_blocks(pieces: Iterable[np.ndarray], *, sample_rate_hz: int) -> Iterator[np.ndarray]:
    """Resample a stream of float32 pieces [n] to 24 kHz, block by block; ceil(n * 24000 / rate) samples in all.

    Equal to resampling the whole at once, because every block is resampled with its neighbourhood:

        stream      ........................................
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


def read_blocks(path: str | Path) -> Iterator[np.ndarray]:
    """Yield a file as mono float32 blocks [n] at 24 kHz, in constant memory. Raises RefusedFile."""
    with AudioFile(path) as file:
        yield from file.blocks()


def read_audio(path: str | Path) -> np.ndarray:
    """Read a whole file as mono float32 [n] at 24 kHz. Raises RefusedFile."""
    return np.concatenate(list(read_blocks(path)))


_WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_MAX_WAV_BYTES = 2**32 - 1 - _WAV_HEADER.size


class WavWriter:
    """Writes a mono 16-bit PCM WAV as samples come; a context manager. Replaces an existing file.

    The file on disk is a whole WAV at every moment, so what a killed process leaves can be played; while it is open its
    lock is held (`atomic.is_held`). libsndfile is not used here because it hides why a write failed. Raises UserError
    where the disk is full or the folder read-only.
    """

    def __init__(self, path: str | Path, sample_rate_hz: int = SAMPLE_RATE_HZ) -> None:
        self.path = Path(path)
        self._rate = sample_rate_hz
        self._data_bytes = 0
        with explain_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            drop_leftovers(self.path)
            partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
            self._file = open(partial, "wb", buffering=0)  # noqa: SIM115 (closed by close)
            try:
                with suppress(OSError):  # a file system may have no locks
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._write(self._header(), offset=0)
                os.replace(partial, self.path)
            except OSError:
                self._file.close()
                partial.unlink(missing_ok=True)
                raise

    def append(self, samples: np.ndarray | torch.Tensor) -> None:
        """Add float samples [n]; values outside -1..1 are clipped."""
        values = np.asarray(samples.detach().cpu() if isinstance(samples, torch.Tensor) else samples, dtype=np.float32)
        assert values.ndim == 1 and np.isfinite(values).all()
        # 32768, not 32767: libsndfile divides by it on reading, so mu-law values come back as the same class.
        pcm = np.clip(np.rint(values * 32768), -32768, 32767).astype("<i2").tobytes()
        if self._data_bytes + len(pcm) > _MAX_WAV_BYTES:
            hours = _MAX_WAV_BYTES / 2 / self._rate / 3600
            raise UserError(f"cannot write {self.path}: a WAV holds at most {hours:.0f} hours; write several files")
        with explain_write_errors(self.path, then="sample into another --out; what was made so far can be played"):
            # Samples first, header second: a process killed in between leaves a header that is true.
            self._write(pcm, offset=_WAV_HEADER.size + self._data_bytes)
            self._data_bytes += len(pcm)
            self._write(self._header(), offset=0)

    def close(self) -> None:
        """Close the file; nothing is left to write."""
        self._file.close()

    def _header(self) -> bytes:
        size = self._data_bytes
        pcm, channels, bytes_per_sample = 1, 1, 2
        return _WAV_HEADER.pack(
            b"RIFF", _WAV_HEADER.size - 8 + size, b"WAVE", b"fmt ", 16, pcm, channels, self._rate,
            self._rate * bytes_per_sample, bytes_per_sample, 8 * bytes_per_sample, b"data", size,
        )  # fmt: skip

    def _write(self, content: bytes, *, offset: int) -> None:
        self._file.seek(offset)
        view = memoryview(content)
        while view:  # a raw write may take a part only
            view = view[self._file.write(view) :]

    def __enter__(self) -> "WavWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_wav(path: str | Path, samples: np.ndarray | torch.Tensor, sample_rate_hz: int = SAMPLE_RATE_HZ) -> None:
    """Write float samples [n] in -1..1 as a mono 16-bit PCM WAV. Raises UserError where the disk refuses."""
    with WavWriter(path, sample_rate_hz) as writer:
        writer.append(samples)
