"""Draws the rows of a table, ours beside the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from waveform.system.panels import COLOURS, panels


@dataclass(frozen=True)
class Row:
    """One row: what it is called, our figure of `mean_and_interval`, and the paper's."""

    name: str
    ours: Mapping[str, Any]
    published: float
    note: str = ""  # written above our figure


def save_rows(path: Path, rows: Sequence[Row], *, recipe: str, unit: str, published_as: str) -> None:
    """Draw each row's mean and seeds, and the paper's figure in a panel of its own.

    Raises UserError if the picture cannot be written.
    """
    places = np.arange(len(rows))[::-1]
    with panels(path, 2, size=(5.5, 1 + 0.45 * len(rows)), sharey=True) as (ours, paper):
        for place, row in zip(places, rows, strict=True):
            seeds = row.ours["seeds"]
            ours.plot(seeds, [place] * len(seeds), marker="o", linestyle="", color=COLOURS[0], alpha=0.4)
            ours.plot([row.ours["mean"]], [place], marker="D", color=COLOURS[0])
            ours.annotate(row.note, (row.ours["mean"], place), (0, 6), textcoords="offset points", fontsize=7)
            paper.plot([row.published], [place], marker="D", color=COLOURS[1])
        ours.set_yticks(places, [row.name for row in rows])
        ours.set_title(f"here, on {recipe}")
        ours.set_xlabel(f"test, {unit}")
        paper.set_title("in the paper")
        paper.set_xlabel(published_as)
        for axes in (ours, paper):
            axes.margins(0.1)  # room for the notes of the outermost
