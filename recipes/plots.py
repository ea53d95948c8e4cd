"""Draws curves over seeds: what models recall, by distance; return against steps in training, read from run folders."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from waveform.engine.metrics import read_metrics
from waveform.system.panels import COLOURS, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_POINTS = 40  # of a curve of returns, on which seeds are averaged


def draw_over_seeds(axes: "Axes", i: int, label: str, x: Any, values: np.ndarray, *, marker: str = "") -> None:
    """Draw the i-th curve: means over seeds of `values` [seeds, x], shaded from the lowest to the highest."""
    colour = COLOURS[i % len(COLOURS)]
    axes.plot(x, values.mean(axis=0), marker=marker, markersize=3, color=colour, label=label)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def save_recall(path: Path, questions: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
    """Draw a panel of each question: bits by distance of each model's figures, as `evaluate` returns them, by seed.

    All were evaluated on the same tokens. Raises UserError if the picture cannot be written.
    """
    first = next(iter(next(iter(questions.values())).values()))[0]
    middles = [(entry["from"] + entry["to"]) / 2 for entry in first["bits_by_distance"]]
    with panels(path, len(questions), columns=_COLUMNS, size=(4.3, 3.6), sharey=True) as every:
        for i, (axes, (title, curves)) in enumerate(zip(every, questions.items(), strict=True)):
            axes.axhline(first["chance_bits"], color="0.6", linewidth=1, linestyle="--")
            axes.annotate("chance", (middles[0], first["chance_bits"]), fontsize=8, color="0.4", va="bottom")
            for j, (label, seeds) in enumerate(curves.items()):
                bits = np.array([[entry["bits"] for entry in figures["bits_by_distance"]] for figures in seeds])
                draw_over_seeds(axes, j, label, middles, bits, marker="o")
            axes.set(title=title, xlabel="steps since the fact was last seen")
            if i % _COLUMNS == 0:
                axes.set_ylabel("bits per answer")
            axes.set_ylim(bottom=0)
            axes.legend()


def read_returns(run_dir: Path) -> np.ndarray:
    """Read steps seen, and mean return of the episodes that ended since the previous record [records, 2]."""
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
        returns.set(xlabel="million steps", ylabel="return per episode")
        if by_place:
            _draw_places(every[1], by_place)
        if every[-1].get_legend_handles_labels()[0]:
            every[-1].legend()


def _draw_places(axes: "Axes", by_place: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    places = {place: i for i, place in enumerate(dict.fromkeys(p for shares in by_place.values() for p in shares))}
    if all(place.isdigit() for place in places):
        places = {place: int(place) for place in places}
        axes.set_xlabel("delay, steps")
        axes.axhline(0.5, color="0.6", linewidth=1, linestyle="--")  # chance, in object matching
    else:
        axes.set_xticks(list(places.values()), list(places), rotation=15, ha="right")
    for i, (label, shares) in enumerate(by_place.items()):
        if shares:
            draw_over_seeds(axes, i, label, [places[p] for p in shares], np.array(list(shares.values())).T)
    axes.set_ylabel("successes of the trained agent")


def _smoothed(seed: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The mean of the records near each of `steps`, which are evenly spaced."""
    half = (steps[1] - steps[0]) / 2 if len(steps) > 1 and steps[1] > steps[0] else np.inf
    near = abs(seed[:, 0] - steps[:, None]) <= half
    means = (near * seed[:, 1]).sum(axis=1) / near.sum(axis=1).clip(min=1)
    return np.where(near.any(axis=1), means, np.interp(steps, seed[:, 0], seed[:, 1]))
