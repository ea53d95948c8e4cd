"""Return against steps in training, read from run folders: for `compare --plot` and for studies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recipes.plots import draw_over_seeds
from waveform.engine.metrics import read_metrics
from waveform.system.panels import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    with panels(path, 2 if by_place else 1, size=(4.9, 3.8)) as every:
        returns = every[0]
        for i, (label, seeds) in enumerate(curves.items()):
            seeds = [seed for seed in seeds if len(seed)]
            if seeds:
                steps = np.linspace(max(s[0, 0] for s in seeds), min(s[-1, 0] for s in seeds), _POINTS)
                draw_over_seeds(returns, i, label, steps / 1e6, np.array([_smoothed(seed, steps) for seed in seeds]))
        returns.set_xlabel("million steps")
        returns.set_ylabel("return an episode")
        if by_place:
            _draw_places(every[1], by_place)
        if every[-1].get_legend_handles_labels()[0]:
            every[-1].legend()


def _draw_places(axes: "Axes", by_place: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    places = {place: i for i, place in enumerate(dict.fromkeys(p for shares in by_place.values() for p in shares))}
    if all(place.isdigit() for place in places):
        places = {place: int(place) for place in places}
        axes.set_xlabel("delay, steps")
    else:
        axes.set_xticks(list(places.values()), list(places), rotation=15, ha="right")
    for i, (label, shares) in enumerate(by_place.items()):
        if shares:
            draw_over_seeds(axes, i, label, [places[p] for p in shares], np.array(list(shares.values())).T)
    axes.axhline(0.5, color="0.6", linewidth=1, linestyle="--")
    axes.set_ylabel("right choices of the trained agent")


def _smoothed(seed: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The mean of the records near each of `steps`, which are evenly spaced."""
    half = (steps[1] - steps[0]) / 2 if len(steps) > 1 and steps[1] > steps[0] else np.inf
    near = abs(seed[:, 0] - steps[:, None]) <= half
    means = (near * seed[:, 1]).sum(axis=1) / near.sum(axis=1).clip(min=1)
    return np.where(near.any(axis=1), means, np.interp(steps, seed[:, 0], seed[:, 1]))
