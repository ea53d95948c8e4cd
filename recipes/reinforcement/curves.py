"""Return against steps in training, read from run folders: for `compare --plot` and for studies."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from waveform.engine.metrics import read_metrics
from waveform.system.output import write_png

_COLOURS = ("#30578f", "#8a3b12", "#d98a2b", "#4a7c59", "#7a4b8c", "#777777", "#1b9e9e", "#b5527a")
_POINTS = 40  # of a curve, on which seeds are averaged


def read_returns(run_dir: Path) -> np.ndarray:
    """Steps seen and mean return of the episodes that ended since the record before [records, 2]."""
    records = [r for r in read_metrics(run_dir) if r["kind"] == "train" and "return_mean" in r]
    return np.array([(r["steps_seen"], r["return_mean"]) for r in records], dtype=float).reshape(-1, 2)


def save_returns(path: Path, panels: Mapping[str, Mapping[str, Sequence[np.ndarray]]], *, chance: float | None) -> None:
    """Draw panels {title: {label: what `read_returns` gave of each seed}}: means, shaded from lowest to highest.

    chance: a return to mark. Raises UserError if the picture cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels) + 0.6, 3.8), dpi=110, layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)
    for axes, (title, curves) in zip(grid[0], panels.items(), strict=True):
        if chance is not None:
            axes.axhline(chance, color="0.6", linewidth=1, linestyle="--")
        for i, (label, seeds) in enumerate(curves.items()):
            seeds = [seed for seed in seeds if len(seed)]
            if not seeds:
                continue
            steps = np.linspace(max(s[0, 0] for s in seeds), min(s[-1, 0] for s in seeds), _POINTS)
            values = np.array([_smoothed(seed, steps) for seed in seeds])
            colour = _COLOURS[i % len(_COLOURS)]
            axes.plot(steps / 1e6, values.mean(axis=0), color=colour, label=label)
            axes.fill_between(
                steps / 1e6, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0
            )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("million steps", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(True, axis="y", color="0.9", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
    grid[0, 0].set_ylabel("return an episode", fontsize=9)
    write_png(path, figure)


def _smoothed(seed: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The mean of the records near each of `steps`, which are evenly spaced."""
    half = (steps[1] - steps[0]) / 2 if len(steps) > 1 and steps[1] > steps[0] else np.inf
    near = abs(seed[:, 0] - steps[:, None]) <= half
    means = (near * seed[:, 1]).sum(axis=1) / near.sum(axis=1).clip(min=1)
    return np.where(near.any(axis=1), means, np.interp(steps, seed[:, 0], seed[:, 1]))
