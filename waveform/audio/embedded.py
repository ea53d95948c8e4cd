"""Sounds and their pictures as bytes, to stand inside a page: FLAC, and mel spectrograms as JPEG."""

import io

import numpy as np
import soundfile

from waveform.audio.plots import mel_image


def flac_bytes(samples: np.ndarray, *, sample_rate_hz: int) -> bytes:
    """Mono samples [n] in -1..1 as 16-bit FLAC: every browser plays it, and it is shorter than a WAV."""
    content = io.BytesIO()
    soundfile.write(content, samples, sample_rate_hz, format="FLAC", subtype="PCM_16")
    return content.getvalue()


def mel_jpeg(samples: np.ndarray, *, sample_rate_hz: int) -> bytes:
    """The mel spectrogram of samples [n] as a JPEG, 100 columns a second."""
    from matplotlib.image import imsave

    content = io.BytesIO()
    imsave(content, mel_image(samples, sample_rate_hz=sample_rate_hz), format="jpeg", pil_kwargs={"quality": 80})
    return content.getvalue()
