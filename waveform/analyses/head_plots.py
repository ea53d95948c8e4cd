"""Draws attention by head, a panel for each term of the score, and the widest heads query by query (plots.py)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from waveform.analyses.heads import TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOP = 0.2  # share of a head's weights that is marked, as in Figure 6
_CONTRAST = 1e-3  # of the smallest weight that is drawn, to the largest


def draw_heads(axes: "list[Axes]", entry: dict[str, Any]) -> None:
    """Draw the distributions of all heads over distances, of the whole score and of each of its terms.

    axes: as many as there are terms in the paper, and one. A row is a head, a column a distance, nearest at the left.
    One scale of grey serves all of them, so that a term that is flat by itself looks flat.
    """
    figures = entry["attention_by_head"]
    slots = np.maximum(figures["slots"], 1e-9)
    every = [figures, *figures["terms"].values()]
    highest = max(float((np.array(values["weight"]) / slots).max()) for values in every)
    panels = [("all terms", figures), *((f"({i}) {TERMS[i]}", figures["terms"].get(i)) for i in TERMS)]
    for panel, (title, values) in zip(axes, panels, strict=True):
        panel.set_title(title)
        if values is None:
            panel.text(0.5, 0.5, "this score has no such term", ha="center", va="center", color="0.4", fontsize=9)
            panel.set_axis_off()
            continue
        per_slot = np.array(values["weight"]) / slots
        num_layers, num_heads, num_buckets = per_slot.shape
        _image(panel, per_slot.reshape(-1, num_buckets), highest=highest)
        for layer in range(1, num_layers):
            panel.axhline(layer * num_heads - 0.5, color="white", linewidth=0.5)
        panel.set_yticks([i * num_heads for i in range(num_layers)], [str(i) for i in range(num_layers)])
        step = max(1, num_buckets // 4)
        panel.set_xticks(range(0, num_buckets, step), [b["from"] for b in figures["buckets"][::step]])
        panel.set_xlabel("steps back")
    axes[0].set_ylabel("head of layer")


def draw_widest(axes: "list[Axes]", entry: dict[str, Any]) -> None:
    """Draw the heads that look furthest: a row is a query, a column some slots; the top fifth is marked in red."""
    widest = entry["attention_by_head"]["widest"]
    for panel in axes[len(widest) :]:
        panel.set_axis_off()
    for panel, head in zip(axes, widest, strict=False):
        weight = np.array(head["weight"])
        _image(panel, weight, highest=float(weight.max()))
        rows, columns = np.nonzero(weight > np.quantile(weight, 1 - _TOP))
        panel.scatter(columns, rows, s=4, color="#c8102e", linewidths=0)
        title = f"layer {head['layer']} head {head['head']}, {head['mean_distance']:.0f} steps back on average"
        panel.set_title(title)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.set_xlabel("slots, oldest first; red: the highest fifth")
    axes[0].set_ylabel("last queries of a window")


def _image(axes: "Axes", values: np.ndarray, *, highest: float) -> None:
    from matplotlib.colors import LogNorm

    axes.grid(False)
    clipped = np.maximum(values, highest * _CONTRAST)
    axes.imshow(
        clipped, aspect="auto", interpolation="nearest", cmap="Greys", norm=LogNorm(highest * _CONTRAST, highest)
    )
