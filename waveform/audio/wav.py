"""Writes 16-bit WAV files, the last step of sampling; they can be played even while they are being written."""

import fcntl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import numpy as np

from waveform.system.atomic import explain_write_errors, write_all
from waveform.system.errors import UserError
from waveform.system.output import write_bytes

_WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_MAX_WAV_BYTES = 2**32 - 1 - _WAV_HEADER.size
# In a pipe, the length cannot be filled in later. sox writes this number instead, and warns of a cut file if it reads
# another one; ffmpeg, aplay and libsndfile read to the end of the pipe, unless 12 hours come first.
UNKNOWN_BYTES = 0x7FFFF000


def require_wav_length(seconds: float, *, sample_rate_hz: int) -> None:
    """Raises UserError if a sound is too long for one WAV file."""
    longest_s = _MAX_WAV_BYTES / 2 / sample_rate_hz
    if seconds > longest_s:
        raise UserError(
            f"a WAV holds at most {longest_s / 3600:.0f} hours at this rate, not {seconds:g} s; write several files"
        )


def pcm_bytes(samples: np.ndarray) -> bytes:
    """Turn float samples [n] into 16-bit little-endian PCM; values outside -1..1 are clipped."""
    values = np.asarray(samples, dtype=np.float32)
    assert values.ndim == 1 and np.isfinite(values).all()
    # 32768, not 32767: libsndfile divides by it when reading, so that mu-law values return as the same class.
    return np.clip(np.rint(values * 32768), -32768, 32767).astype("<i2").tobytes()


def wav_header(num_bytes: int, sample_rate_hz: int) -> bytes:
    """Return the header of a mono 16-bit PCM WAV with `num_bytes` of samples, which may be `UNKNOWN_BYTES`."""
    pcm, channels, bytes_per_sample = 1, 1, 2
    return _WAV_HEADER.pack(
        b"RIFF", _WAV_HEADER.size - 8 + num_bytes, b"WAVE", b"fmt ", 16, pcm, channels, sample_rate_hz,
        sample_rate_hz * bytes_per_sample, bytes_per_sample, 8 * bytes_per_sample, b"data", num_bytes,
    )  # fmt: skip


@contextmanager
def wav_writer(path: Path, *, sample_rate_hz: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Open a mono 16-bit PCM WAV, and yield a function that appends float samples [n], clipped to -1..1.

    An existing file is replaced. The file on disk is a complete WAV at every moment, so that what a killed process
    leaves can be played. While it is open, it is locked (`atomic.is_held`). libsndfile is not used because it hides
    why a write failed. Raises UserError if the disk is full or the folder read-only, and for too many samples.
    """
    with explain_write_errors(path):
        write_bytes(path, wav_header(0, sample_rate_hz))
        file = FileIO(path, "r+")
    num_bytes = 0  # of samples

    def append(samples: np.ndarray) -> None:
        nonlocal num_bytes
        pcm = pcm_bytes(samples)
        require_wav_length((num_bytes + len(pcm)) / 2 / sample_rate_hz, sample_rate_hz=sample_rate_hz)
        with explain_write_errors(path, then="sample into another --out; what was written so far can be played"):
            # Samples first, header second: if the process is killed in between, the header is still true.
            file.seek(_WAV_HEADER.size + num_bytes)
            write_all(file, pcm)
            num_bytes += len(pcm)
            file.seek(0)
            write_all(file, wav_header(num_bytes, sample_rate_hz))

    with file:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield append


def write_wav(path: Path, samples: np.ndarray, *, sample_rate_hz: int) -> None:
    """Write float samples [n] in -1..1 as a mono 16-bit PCM WAV. Raises UserError if the file cannot be written."""
    with wav_writer(path, sample_rate_hz=sample_rate_hz) as append:
        append(samples)
