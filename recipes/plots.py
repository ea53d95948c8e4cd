"""Draws what models recall, by distance: a panel for each question, a curve for each model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from waveform.system.output import write_png

_COLUMNS = 3
_COLOURS = ("#30578f", "#8a3b12", "#d98a2b", "#4a7c59", "#7a4b8c", "#777777")


@dataclass(frozen=True)
class Curve:
    """One model's figures, as `evaluate` returns them, from each of its seeds."""

    label: str
    seeds: Sequence[Mapping[str, Any]]

    def bits(self) -> np.ndarray:
        """Bits per answer [seeds, buckets of distance]."""
        return np.array([[entry["bits"] for entry in figures["bits_by_distance"]] for figures in self.seeds])


def save_recall(path: Path, panels: Sequence[tuple[str, Sequence[Curve]]]) -> None:
    """Draw panels of (title, curves): means over seeds, shaded from the lowest seed to the highest.

    All were evaluated on the same tokens. Raises UserError if the picture cannot be written.
    """
    from matplotlib.figure import Figure

    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns + 1, 3.6 * rows), dpi=110, layout="constrained")
    first = panels[0][1][0].seeds[0]
    middles = [(entry["from"] + entry["to"]) / 2 for entry in first["bits_by_distance"]]
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, curves) in zip(grid.flat, panels, strict=False):
        axes.axhline(first["chance_bits"], color="0.6", linewidth=1, linestyle="--")
        axes.annotate("chance", (middles[0], first["chance_bits"]), fontsize=8, color="0.4", va="bottom")
        for i, curve in enumerate(curves):
            bits, colour = curve.bits(), _COLOURS[i % len(_COLOURS)]
            axes.plot(middles, bits.mean(axis=0), marker="o", markersize=3, color=colour, label=curve.label)
            axes.fill_between(middles, bits.min(axis=0), bits.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("steps since the fact was last seen", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(True, axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("bits per answer", fontsize=9)
    write_png(path, figure)
