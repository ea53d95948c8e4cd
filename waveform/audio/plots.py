"""Pictures of audio: the demo's panel of clips and learning curves, and mel spectrograms for other pages."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from waveform.system.panels import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FFT_S = 0.043  # of which the nearest power of two in samples is taken
_HOPS_PER_S = 100
_NUM_MELS = 80
_FLOOR_DB, _CEILING_DB = -90.0, -10.0  # speech peaks near -20
_DPI = 110
_WIDTH_IN = 1600 / _DPI
_COLOURS = "magma"
_TICKS_HZ = tuple(500 * 2**octave for octave in range(5))


def mel_decibels(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """Mel spectrogram [80, frames] of mono samples [n], low to high; 0 dB is a sine of full scale.

    The reference is fixed, not the clip's own maximum, so that a loud and a quiet clip look different.
    """
    samples = np.asarray(samples, dtype=np.float32)
    size = 2 ** round(math.log2(_FFT_S * sample_rate_hz))
    padded = np.pad(samples, (size // 2, size // 2 + max(0, size - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[:: sample_rate_hz // _HOPS_PER_S]
    spectrum = np.fft.rfft(np.hanning(size + 1)[:-1] * frames).astype(np.complex64)
    full_scale = (size / 4) ** 2  # power of a sine of amplitude 1 under a Hann window
    power = _mel_filters(size, sample_rate_hz=sample_rate_hz) @ (np.abs(spectrum) ** 2).T / full_scale
    return 10 * np.log10(np.maximum(power, 1e-12))


def _mel_filters(size: int, *, sample_rate_hz: int) -> np.ndarray:
    """Triangular filters of height 1 [80, size / 2 + 1] fp32, like those of librosa.filters.mel.

    That function and librosa.feature.melspectrogram import modules that compile for 13 s when first used.
    """
    corners_hz = _mel_corners_hz(sample_rate_hz)[:, None]
    bins_hz = np.fft.rfftfreq(size, 1 / sample_rate_hz)
    widths_hz = np.diff(corners_hz, axis=0)
    rising, falling = (bins_hz - corners_hz[:-2]) / widths_hz[:-1], (corners_hz[2:] - bins_hz) / widths_hz[1:]
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)


def _mel_corners_hz(sample_rate_hz: int) -> np.ndarray:
    """Return the frequencies at which filters begin, peak and end [82]: filter i at corners i, i + 1 and i + 2."""
    from librosa.core.convert import mel_frequencies  # importing takes a second, which only pictures should pay

    return mel_frequencies(n_mels=_NUM_MELS + 2, fmax=sample_rate_hz / 2)


def mel_image(samples: np.ndarray, *, sample_rate_hz: int) -> np.ndarray:
    """Draw the mel spectrogram of samples [n] as an image [160, frames, 3] uint8, high frequencies on top."""
    from matplotlib import colormaps

    level = (mel_decibels(samples, sample_rate_hz=sample_rate_hz)[::-1] - _FLOOR_DB) / (_CEILING_DB - _FLOOR_DB)
    image = colormaps[_COLOURS](np.clip(level, 0, 1), bytes=True)[..., :3]
    return np.ascontiguousarray(np.repeat(image, 2, axis=0))


def mel_jpeg(samples: np.ndarray, *, sample_rate_hz: int) -> bytes:
    """The mel spectrogram of samples [n] as a JPEG, 100 columns per second."""
    from matplotlib.image import imsave

    content = io.BytesIO()
    imsave(content, mel_image(samples, sample_rate_hz=sample_rate_hz), format="jpeg", pil_kwargs={"quality": 80})
    return content.getvalue()


def save_demo_panel(
    path: str | Path,
    clips: Mapping[str, np.ndarray],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    sample_rate_hz: int,
) -> None:
    """Draw a PNG, 1600 pixels wide: each clip's waveform and mel spectrogram, and the NLL curves below them.

    clips: title -> mono samples [n]; curves: model -> points (training seconds, nats per sample); at least one of each.
    Raises UserError if the picture cannot be written.
    """
    heights = [1.0] * len(clips) + [1.9]
    # One time axis for all clips, so that a short one looks short; one amplitude, so that a quiet one looks quiet.
    longest_s = max(map(len, clips.values())) / sample_rate_hz
    loudest = max(float(np.abs(samples).max()) for samples in clips.values())
    with drawing(path, size=(_WIDTH_IN, 1.6 * sum(heights) + 0.4), dpi=_DPI) as figure:
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        spectrograms: list[Axes] = []
        for row, (title, samples) in enumerate(clips.items()):
            left, right = (figure.add_subplot(grid[row, column]) for column in range(2))
            _draw_waveform(left, samples, limit=1.05 * loudest, sample_rate_hz=sample_rate_hz)
            mesh = _draw_spectrogram(right, samples, sample_rate_hz=sample_rate_hz)
            left.set_title(f"{title}  ({len(samples) / sample_rate_hz:.2f} s)")
            right.set_title("mel spectrogram", color="0.4")
            is_last = row == len(clips) - 1
            for axes in (left, right):
                axes.set_xlim(0, longest_s)
                axes.tick_params(labelbottom=is_last)
                axes.set_xlabel("seconds" * is_last)
            spectrograms.append(right)
        figure.colorbar(mesh, ax=spectrograms, fraction=0.025, pad=0.01, aspect=40).set_label("dB, 0 = full-scale sine")
        _draw_curves(figure.add_subplot(grid[-1, :]), curves)


def _draw_waveform(axes: "Axes", samples: np.ndarray, *, limit: float, sample_rate_hz: int) -> None:
    """Draw each pixel column's range of values: drawing every sample is slow and looks the same."""
    step = max(1, len(samples) // 4000)
    columns = -(-len(samples) // step)
    parts = np.pad(samples, (0, columns * step - len(samples)), mode="edge").reshape(columns, step)
    times_s = np.arange(columns) * step / sample_rate_hz
    axes.fill_between(times_s, parts.min(axis=1), parts.max(axis=1), color="#30578f", linewidth=0.4)
    axes.set_ylim(-limit, limit)


def _draw_spectrogram(axes: "Axes", samples: np.ndarray, *, sample_rate_hz: int) -> Any:
    axes.grid(False)
    decibels = mel_decibels(samples, sample_rate_hz=sample_rate_hz)
    mesh = axes.imshow(
        decibels,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap=_COLOURS,
        vmin=_FLOOR_DB,
        vmax=_CEILING_DB,
        extent=(0, decibels.shape[1] / _HOPS_PER_S, 0, _NUM_MELS),
    )
    ticks_hz = [hz for hz in _TICKS_HZ if hz < sample_rate_hz / 2]
    positions = np.interp(ticks_hz, _mel_corners_hz(sample_rate_hz)[1:-1], np.arange(_NUM_MELS) + 0.5)
    axes.set_yticks(positions, [f"{hz / 1000:g}k" for hz in ticks_hz])
    return mesh


def _draw_curves(axes: "Axes", curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for name, points in curves.items():
        ordered = sorted(points)
        label = f"{name}: {ordered[-1][1]:.3f}" if ordered else f"{name}: no points"
        axes.plot(*zip(*ordered, strict=True) if ordered else ([], []), marker="o", markersize=3, label=label)
    axes.set(xlabel="training seconds", ylabel="nats per sample")
    axes.set_title("NLL over training time (the last value in the legend)")
    axes.legend()
