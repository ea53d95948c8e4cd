"""Return against steps in training, read from run folders: for `compare --plot` and for studies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from waveform.engine.metrics import read_metrics
from waveform.system.output import write_png

_COLOURS = ("#30578f", "#8a3b12", "#d98a2b", "#4a7c59", "#7a4b8c", "#777777", "#1b9e9e", "#b5527a")
_POINTS = 40  # of a curve, on which seeds are averaged


def read_returns(run_dir: Path) -> np.ndarray:
    """Steps seen and mean return of the episodes that ended since the record before [records, 2]."""
    records = [r for r in read_metrics(run_dir) if r["kind"] == "train" and "return_mean" in r]
    return np.array([(r["steps_seen"], r["return_mean"]) for r in records], dtype=float).reshape(-1, 2)


def save_returns(
    path: Path,
    curves: Mapping[str, Sequence[np.ndarray]],
    by_place: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> None:
    """Draw means of several seeds, shaded from lowest to highest. Raises UserError if the picture cannot be written.

    curves: {label: what `read_returns` gave of each seed}; by_place: {label: {delay in steps or environment: share of
    right choices of each seed}}, for a panel of its own.
    """
    from matplotlib.figure import Figure

    num_panels = 2 if by_place else 1
    figure = Figure(figsize=(4.6 * num_panels + 0.6, 3.8), dpi=110, layout="constrained")
    returns, *others = figure.subplots(1, num_panels, squeeze=False)[0]
    for i, (label, seeds) in enumerate(curves.items()):
        seeds = [seed for seed in seeds if len(seed)]
        if seeds:
            steps = np.linspace(max(s[0, 0] for s in seeds), min(s[-1, 0] for s in seeds), _POINTS)
            _draw(returns, i, label, steps / 1e6, np.array([_smoothed(seed, steps) for seed in seeds]))
    returns.set_xlabel("million steps", fontsize=9)
    returns.set_ylabel("return an episode", fontsize=9)
    for axes in others:
        assert by_place is not None
        places = {place: i for i, place in enumerate(dict.fromkeys(p for shares in by_place.values() for p in shares))}
        if all(place.isdigit() for place in places):
            places = {place: int(place) for place in places}
            axes.set_xlabel("delay, steps", fontsize=9)
        else:
            axes.set_xticks(list(places.values()), list(places), rotation=15, ha="right")
        for i, (label, shares) in enumerate(by_place.items()):
            if shares:
                _draw(axes, i, label, np.array([places[p] for p in shares]), np.array(list(shares.values())).T)
        axes.axhline(0.5, color="0.6", linewidth=1, linestyle="--")
        axes.set_ylabel("right choices of the trained agent", fontsize=9)
    panels = (returns, *others)
    for axes in panels:
        axes.tick_params(labelsize=8)
        axes.grid(True, axis="y", color="0.9", linewidth=0.6)
    if panels[-1].get_legend_handles_labels()[0]:
        panels[-1].legend(frameon=False, fontsize=8)
    write_png(path, figure)


def _draw(axes: Any, i: int, label: str, x: np.ndarray, values: np.ndarray) -> None:
    """The i-th curve: values [seeds, x]."""
    colour = _COLOURS[i % len(_COLOURS)]
    axes.plot(x, values.mean(axis=0), color=colour, label=label)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def _smoothed(seed: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The mean of the records near each of `steps`, which are evenly spaced."""
    half = (steps[1] - steps[0]) / 2 if len(steps) > 1 and steps[1] > steps[0] else np.inf
    near = abs(seed[:, 0] - steps[:, None]) <= half
    means = (near * seed[:, 1]).sum(axis=1) / near.sum(axis=1).clip(min=1)
    return np.where(near.any(axis=1), means, np.interp(steps, seed[:, 0], seed[:, 1]))
