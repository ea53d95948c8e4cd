"""Pictures of audio: the demo's panel of clips and learning curves, and the mel spectrograms in TensorBoard.

They are drawn on matplotlib's Agg canvas without pyplot, so that nothing depends on a display or on another figure.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from waveform.audio import SAMPLE_RATE_HZ
from waveform.system.output import write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FFT = 1024  # samples, 43 ms
_HOP = 240  # samples, 10 ms
_NUM_MELS = 80
_FLOOR_DB, _CEILING_DB = -90.0, -10.0  # speech peaks near -20
_WIDTH_IN, _DPI = 16, 100
_COLOURS = "magma"
_TICKS_HZ = (500, 1000, 2000, 4000, 8000)


def mel_decibels(samples: np.ndarray) -> np.ndarray:
    """Mel spectrogram [80, frames] of mono 24 kHz samples [n], low to high; 0 dB is a sine of full scale.

    The reference is fixed, not the clip's own maximum, so that a loud and a quiet clip look different.
    """
    samples = np.asarray(samples, dtype=np.float32)
    padded = np.pad(samples, (_FFT // 2, _FFT // 2 + max(0, _FFT - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::_HOP]
    spectrum = np.fft.rfft(np.hanning(_FFT + 1)[:-1] * frames).astype(np.complex64)
    full_scale = (_FFT / 4) ** 2  # power of a sine of amplitude 1 under a Hann window
    power = _mel_filters() @ (np.abs(spectrum) ** 2).T / full_scale
    return 10 * np.log10(np.maximum(power, 1e-12))


def _mel_filters() -> np.ndarray:
    """Triangular filters of height 1 [80, 513] fp32, as librosa.filters.mel has them.

    Calling that, or librosa.feature.melspectrogram, imports modules that compile for 13 s when they are first used.
    """
    corners_hz = _mel_corners_hz()[:, None]
    bins_hz = np.fft.rfftfreq(_FFT, 1 / SAMPLE_RATE_HZ)
    widths_hz = np.diff(corners_hz, axis=0)
    rising, falling = (bins_hz - corners_hz[:-2]) / widths_hz[:-1], (corners_hz[2:] - bins_hz) / widths_hz[1:]
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)


def _mel_corners_hz() -> np.ndarray:
    """Return the frequencies at which filters begin, peak and end [82]: filter i at corners i, i + 1 and i + 2."""
    from librosa.core.convert import mel_frequencies  # importing takes a second, which only pictures should pay

    return mel_frequencies(n_mels=_NUM_MELS + 2, fmax=SAMPLE_RATE_HZ / 2)


def mel_image(samples: np.ndarray) -> np.ndarray:
    """Draw the mel spectrogram of samples [n] as an image [160, frames, 3] uint8, high frequencies on top."""
    from matplotlib import colormaps

    level = (mel_decibels(samples)[::-1] - _FLOOR_DB) / (_CEILING_DB - _FLOOR_DB)
    image = colormaps[_COLOURS](np.clip(level, 0, 1), bytes=True)[..., :3]
    return np.ascontiguousarray(np.repeat(image, 2, axis=0))


def save_demo_panel(
    path: str | Path,
    clips: Mapping[str, np.ndarray],
    curves: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Draw a PNG, 1600 pixels wide: each clip's waveform and mel spectrogram, and the NLL curves below them.

    `clips`: title -> mono 24 kHz samples [n]; `curves`: model -> (training seconds, nats per sample) points. Either
    may be empty. Raises UserError if the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curve_rows = [1.9] if curves else []
    heights = [1.0] * len(clips) + curve_rows
    figure = Figure(figsize=(_WIDTH_IN, max(2.0, 1.75 * sum(heights) + 0.4)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights) or 1, 2, height_ratios=heights or [1])
    # One time axis for all clips, so that a short one looks short; one amplitude, so that a quiet one looks quiet.
    longest_s = max((len(samples) / SAMPLE_RATE_HZ for samples in clips.values()), default=0.0)
    loudest = max((float(np.abs(samples).max()) for samples in clips.values() if len(samples)), default=1.0) or 1.0
    spectrogram_axes: list[Axes] = []
    mesh: Any = None
    for row, (title, samples) in enumerate(clips.items()):
        left = figure.add_subplot(grid[row, 0])
        right = figure.add_subplot(grid[row, 1])
        _draw_waveform(left, samples, limit=1.05 * loudest)
        mesh = _draw_spectrogram(right, samples)
        left.set_title(f"{title}  ({len(samples) / SAMPLE_RATE_HZ:.2f} s)", loc="left", fontsize=11)
        right.set_title("mel spectrogram", loc="left", fontsize=11, color="0.4")
        for axes in (left, right):
            axes.set_xlim(0, longest_s or 1.0)
            axes.tick_params(labelsize=9, labelbottom=row == len(clips) - 1)
        if row == len(clips) - 1:
            left.set_xlabel("seconds")
            right.set_xlabel("seconds")
        spectrogram_axes.append(right)
    if mesh is not None:
        bar = figure.colorbar(mesh, ax=spectrogram_axes, fraction=0.025, pad=0.01, aspect=40)
        bar.set_label("dB, 0 = full-scale sine", fontsize=9)
        bar.ax.tick_params(labelsize=9)
    if curves:
        _draw_curves(figure.add_subplot(grid[len(clips), :]), curves)
    write_png(path, figure)


def _draw_waveform(axes: "Axes", samples: np.ndarray, *, limit: float) -> None:
    """Draw each pixel column's range of values: drawing 24,000 points a second is slow and looks the same."""
    samples = np.asarray(samples, dtype=np.float32)
    step = max(1, len(samples) // 4000)
    columns = -(-len(samples) // step)
    padded = np.pad(samples, (0, columns * step - len(samples)), mode="edge" if len(samples) else "constant")
    parts = padded.reshape(columns, step)
    times_s = np.arange(columns) * step / SAMPLE_RATE_HZ
    if columns:
        axes.fill_between(times_s, parts.min(axis=1), parts.max(axis=1), color="#30578f", linewidth=0.4)
    axes.set_ylim(-limit, limit)
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_spectrogram(axes: "Axes", samples: np.ndarray) -> Any:
    decibels = mel_decibels(samples)
    mesh = axes.imshow(
        decibels,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap=_COLOURS,
        vmin=_FLOOR_DB,
        vmax=_CEILING_DB,
        extent=(0, decibels.shape[1] * _HOP / SAMPLE_RATE_HZ, 0, _NUM_MELS),
    )
    positions = np.interp(_TICKS_HZ, _mel_corners_hz()[1:-1], np.arange(_NUM_MELS) + 0.5)
    axes.set_yticks(positions, [f"{hz / 1000:g}k" for hz in _TICKS_HZ])
    return mesh


def _draw_curves(axes: "Axes", curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for name, points in curves.items():
        ordered = sorted(points)
        label = f"{name}: {ordered[-1][1]:.3f}" if ordered else f"{name}: no points"
        axes.plot(*zip(*ordered, strict=True) if ordered else ([], []), marker="o", markersize=3, label=label)
    axes.set_title("NLL over training time (the last value in the legend)", loc="left", fontsize=11)
    axes.set_xlabel("training seconds")
    axes.set_ylabel("nats per sample")
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.legend(frameon=False, fontsize=10)
    axes.tick_params(labelsize=9)
