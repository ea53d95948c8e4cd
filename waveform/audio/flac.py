"""FLAC by soundfile alone, without checks or a child process: for the sound of pages, and for benchmarks."""

import io
from pathlib import Path

import numpy as np
import soundfile

_DECODED_VALUES = 1 << 20  # at a time


def flac_bytes(samples: np.ndarray, *, sample_rate_hz: int) -> bytes:
    """Samples [n] or [n, channels] in -1..1 as 16-bit FLAC: every browser plays it, and it is shorter than a WAV."""
    content = io.BytesIO()
    soundfile.write(content, samples, sample_rate_hz, format="FLAC", subtype="PCM_16")
    return content.getvalue()


def decode_flac(path: Path) -> None:
    """Decode a file and drop the samples: what `bench` compares `prepare` with."""
    with soundfile.SoundFile(path) as file:
        block = np.empty((_DECODED_VALUES // file.channels, file.channels), dtype=np.float32)
        while len(file.read(out=block, dtype="float32")):
            pass
