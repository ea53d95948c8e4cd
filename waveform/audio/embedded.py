"""Sounds and their pictures as bytes, to stand inside a page: FLAC, and mel spectrograms as JPEG."""

import io

import numpy as np
import soundfile

from waveform.audio import SAMPLE_RATE_HZ
from waveform.audio.plots import mel_image


def flac_bytes(samples: np.ndarray) -> bytes:
    """Mono 24 kHz samples [n] in -1..1 as 16-bit FLAC: every browser plays it, and it is shorter than a WAV."""
    content = io.BytesIO()
    soundfile.write(content, samples, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16")
    return content.getvalue()


def mel_jpeg(samples: np.ndarray) -> bytes:
    """The mel spectrogram of samples [n] as a JPEG, 100 columns a second."""
    from matplotlib.image import imsave

    content = io.BytesIO()
    imsave(content, mel_image(samples), format="jpeg", pil_kwargs={"quality": 80})
    return content.getvalue()
