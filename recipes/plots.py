"""Draws curves over seeds, and what models recall, by distance: a panel for each question, a curve for each model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from waveform.system.panels import COLOURS, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3


def draw_over_seeds(axes: "Axes", i: int, label: str, x: Any, values: np.ndarray, *, marker: str = "") -> None:
    """The i-th curve: means over seeds of `values` [seeds, x], shaded from the lowest to the highest."""
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
            axes.set_title(title)
            axes.set_xlabel("steps since the fact was last seen")
            if i % _COLUMNS == 0:
                axes.set_ylabel("bits per answer")
            axes.set_ylim(bottom=0)
            axes.legend()
