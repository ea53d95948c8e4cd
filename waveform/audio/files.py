"""Audio files: any common format in, as mono 24 kHz blocks; 16-bit WAV out, playable at every moment.

Reading: decode block-wise (libsndfile) -> judge -> average the channels -> resample (torchaudio's windowed sinc) ->
blocks of whole seconds. Memory does not depend on the length of the file.
"""

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from math import gcd
from pathlib import Path
from types import TracebackType

import numpy as np
import soundfile
import torch

from waveform.audio.backend import import_torchaudio
from waveform.engine.atomic import drop_leftovers, explain_write_errors
from waveform.engine.errors import UserError

SAMPLE_RATE_HZ = 24_000
AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif"})
CLIPPED_AMPLITUDE = 0.999  # a decoded sample at or above it counts as clipped

_MIN_RATE_HZ, _MAX_RATE_HZ = 1_000, 768_000
_MAX_CHANNELS = 64
_READ_VALUES = 1 << 20  # samples x channels decoded at a time
_BLOCK_S = 4  # whole seconds: then every rate has a whole number of samples per block, before and after resampling
_UNKNOWN_LENGTH = 0x7FFF0000  # programs that write WAV to a pipe declare a length of this or more
_MPEG_SLACK = 2 * 1152 + 529  # samples: encoders disagree on whether delay and padding count


class RefusedFile(UserError):
    """A file that cannot be used as audio; `reason` says why, without the file's name."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"cannot use {path}: {reason}")
        self._path, self.reason = path, reason

    def __reduce__(self) -> tuple[type, tuple[str | Path, str]]:  # so that it can cross to another process
        return RefusedFile, (self._path, self.reason)


def is_audio_name(name: str) -> bool:
    """Whether a file name ends like audio that this toolkit reads."""
    return os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES


def check_regular(path: str | Path) -> os.stat_result:
    """Stat a file that may be read. Raises RefusedFile for pipes, devices, broken or looping links, no permission."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno == errno.ENOENT:
            reason = "it is a link to nothing" if os.path.islink(path) else "no such file"
        elif error.errno == errno.ELOOP:
            reason = "its links form a loop"
        else:
            reason = error.strerror or str(error)
        raise RefusedFile(path, reason) from error
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise RefusedFile(path, f"it is {kind}, not a regular file")
    if not os.access(path, os.R_OK):
        raise RefusedFile(path, "no permission to read it")
    return status


class AudioFile:
    """One audio file, opened for one pass of reading; a context manager.

    `blocks()` yields mono float32 [n] at 24 kHz. The counters hold what has been read so far. Raises RefusedFile, on
    opening or while reading, for whatever cannot be trusted: damaged, cut short, empty, not finite, absurd rates.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        size_bytes = check_regular(path).st_size
        if size_bytes == 0:
            raise RefusedFile(path, "it is empty (0 bytes)")
        try:
            # Bytes, because soundfile cannot encode names that are not valid UTF-8.
            self._file = soundfile.SoundFile(os.fsencode(path))
        except soundfile.LibsndfileError as error:
            # Some decoders report whatever stops them as a missing file (code 7); it has just been seen.
            detail = error.error_string.strip().rstrip(".") if error.code != 7 else ""
            raise RefusedFile(path, "not readable as audio" + (f" ({detail})" if detail else "")) from error
        try:
            self.sample_rate_hz: int = self._file.samplerate
            self.num_channels: int = self._file.channels
            self._judge_header()
        except BaseException:
            self._file.close()
            raise
        self.num_frames = 0  # decoded so far, at the file's own rate
        self.num_clipped = 0  # samples of any channel, before mixing, with |x| >= CLIPPED_AMPLITUDE

    def __enter__(self) -> "AudioFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield mono float32 blocks [n] at 24 kHz; each but the last is a whole number of seconds."""
        yield from resample_blocks(self._decode(), sample_rate_hz=self.sample_rate_hz)

    def _judge_header(self) -> None:
        rate = self.sample_rate_hz
        if not _MIN_RATE_HZ <= rate <= _MAX_RATE_HZ:
            raise RefusedFile(self.path, f"sample rate {rate} Hz is outside {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz")
        if self.num_channels > _MAX_CHANNELS:
            raise RefusedFile(self.path, f"it has {self.num_channels} channels; at most {_MAX_CHANNELS} are taken")
        if self._file.frames == 0:
            raise RefusedFile(self.path, "it holds no samples")
        # libsndfile mends the lengths of a WAV or AIFF that is cut short, and mentions it in its log only.
        mended = re.search(r"^\s*(?:data|SSND)\s*:\s*(\d+) \(should be (\d+)\)", self._file.extra_info, re.MULTILINE)
        if mended:
            declared, present = int(mended[1]), int(mended[2])
            if present < declared < _UNKNOWN_LENGTH:
                raise RefusedFile(self.path, f"cut short: {present} of the {declared} bytes of audio are there")
        if self._file.format == "OGG":
            _judge_ogg_end(self.path)

    def _decode(self) -> Iterator[np.ndarray]:
        """Yield mono float32 pieces at the file's own rate; count and judge the samples on the way."""
        declared: int = self._file.frames
        piece = np.empty((max(1, _READ_VALUES // self.num_channels), self.num_channels), dtype=np.float32)
        while True:
            try:
                block = self._file.read(dtype="float32", out=piece)
            except soundfile.LibsndfileError as error:
                raise RefusedFile(self.path, f"damaged or cut short: {self._where(declared)}") from error
            if len(block) == 0:
                break
            self.num_frames += len(block)
            low, high = block.min(), block.max()  # both propagate NaN
            if not (np.isfinite(low) and np.isfinite(high)):
                raise RefusedFile(self.path, "it holds samples that are not finite (NaN or infinity)")
            if max(-low, high) >= CLIPPED_AMPLITUDE:
                self.num_clipped += int(np.count_nonzero(np.abs(block) >= CLIPPED_AMPLITUDE))
            yield _mix(block)
        slack = _MPEG_SLACK if self._file.format in ("MP3", "MPEG") else 0
        # A FLAC written to a pipe does not know its length; libsndfile then declares the largest number there is.
        if self.num_frames + slack < declared < 1 << 62:
            raise RefusedFile(self.path, f"cut short: {self._where(declared)}")
        if self.num_frames == 0:
            raise RefusedFile(self.path, "it holds no samples")

    def _where(self, declared: int) -> str:
        total = f"the {declared / self.sample_rate_hz:.2f} s that it declares" if declared < 1 << 62 else "its length"
        return f"decoding stops after {self.num_frames / self.sample_rate_hz:.2f} s of {total}"


def _mix(block: np.ndarray) -> np.ndarray:
    """Average the channels of [n, channels] -> [n], as a fresh array."""
    channels = block.shape[1]
    if channels == 1:
        return block[:, 0].copy()
    if channels == 2:  # several times as fast as a mean over an axis of two
        return (block[:, 0] + block[:, 1]) * np.float32(0.5)
    return block @ np.full(channels, 1 / channels, dtype=np.float32)


def _judge_ogg_end(path: str | Path) -> None:
    """Refuse an Ogg file whose last page is cut or does not end its stream: libsndfile plays it without a word."""
    longest_page = 27 + 255 + 255 * 255
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2 * longest_page))
        tail = file.read()
    start = tail.rfind(b"OggS")
    page = tail[start:]
    if start >= 0 and len(page) >= 27 and len(page) >= 27 + page[26]:
        whole = len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
        if whole and page[5] & 4:
            return
    raise RefusedFile(path, "cut short: its Ogg stream has no end")


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
    block_s = max(1, min(_BLOCK_S, _READ_VALUES // sample_rate_hz))
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
