"""Draws the figures of an analysis, panel by panel."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from waveform.analyses.heads import TERMS
from waveform.system.panels import COLOURS, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"compressed": COLOURS[1], "memory": COLOURS[2], "window": COLOURS[0]}
_ROWS_PER_RUN = 3  # by position and layer, by head and term, the widest heads
_TOP = 0.2  # share of a head's weights that is marked, as in Figure 6
_CONTRAST = 1e-3  # of the smallest weight that is drawn, to the largest
_RATIO = "0.1"  # of the effective context's gains, as in the paper's figure


def save_analysis(path: Path, figures: dict[str, Any]) -> None:
    """Draw what `analyse` returned: three rows for each run with attention, and one for context.

    1600 pixels wide. Raises UserError if the picture cannot be written.
    """
    runs = [entry for entry in figures["runs"] if "absent" not in entry["attention_by_position"]]
    columns = 4 if any("attention_on_answers" in entry for entry in runs) else 3
    rows = _ROWS_PER_RUN * len(runs) + 1
    with drawing(path, size=(16, 3.6 * rows), dpi=100) as figure:
        grid = figure.add_gridspec(rows, 1)

        def row_of(row: int, num: int) -> "list[Axes]":
            parts = grid[row].subgridspec(1, num)
            return [figure.add_subplot(parts[i]) for i in range(num)]

        for i, entry in enumerate(runs):
            row = _ROWS_PER_RUN * i
            axes = row_of(row, columns)
            draw_attention(axes[0], entry)
            _draw_layers(axes[1], entry)
            _draw_compression(axes[2], entry)
            if columns > 3:
                _draw_answers(axes[3], entry)
            _draw_heads(row_of(row + 1, 1 + len(TERMS)), entry)
            _draw_widest(row_of(row + 2, 3), entry)
        nats, gains = row_of(rows - 1, 2)
        _draw_nats(nats, figures)
        _draw_gains(gains, figures)


def _titled(axes: "Axes", title: str, *, absent: str | None = None) -> bool:
    """Set the title; if there is nothing to draw, write why in the axes. Returns whether there is something to draw."""
    axes.set_title(title)
    if absent is not None:
        reason = textwrap.fill(absent, 40)
        axes.text(0.5, 0.5, reason, ha="center", va="center", color="0.4", fontsize=9, transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
    return absent is None


def draw_attention(axes: "Axes", entry: dict[str, Any]) -> None:
    """Draw a bar for each bucket of each region, from what `analyse` has of a run whose attention was seen."""
    attention = entry["attention_by_position"]
    _titled(axes, f"{entry['label']}: attention by position")
    first = highest = 0.0
    for region, values in attention["regions"].items():
        places = np.arange(first, first + len(values["weight"]))
        axes.bar(
            places,
            values["weight"],
            yerr=values["weight_standard_error"],
            color=_COLOURS[region],
            capsize=2,
            width=0.85,
            label=f"{region}, {values['slots']} slots: {sum(values['weight']):.0%}",
        )
        first += len(places)
        highest = max(highest, *values["weight"])
    axes.set(xticks=[], xlabel="six equal buckets of each, oldest first", ylabel="weight of an average query")
    axes.set_ylim(0, 1.3 * highest)  # room for the legend
    axes.legend(loc="upper left")


def _draw_layers(axes: "Axes", entry: dict[str, Any]) -> None:
    attention = entry["attention_by_position"]
    _titled(axes, "by layer, weight per slot that a query sees")
    regions = list(attention["regions"])
    image = np.array(
        [np.concatenate([layer[region]["weight_per_slot"] for region in regions]) for layer in attention["by_layer"]]
    )
    axes.grid(False)
    shown = axes.imshow(image, aspect="auto", cmap="magma", norm="log", vmin=max(image.max() * 1e-4, image.min()))
    for i in range(1, len(regions)):
        axes.axvline(6 * i - 0.5, color="white", linewidth=1)
    axes.set_xticks([6 * i + 2.5 for i in range(len(regions))], regions)
    axes.set_yticks(range(len(image)) if len(image) <= 12 else range(0, len(image), 4))
    axes.set_ylabel("layer, from the input")
    axes.figure.colorbar(shown, ax=axes)


def _draw_compression(axes: "Axes", entry: dict[str, Any]) -> None:
    loss = entry["compression_loss_by_layer"]
    if not _titled(axes, "compression loss by layer", absent=loss.get("absent")):
        return
    axes.bar(range(len(loss["mean"])), loss["mean"], yerr=loss["standard_error"], color=COLOURS[3], capsize=2)
    axes.set_xticks(range(len(loss["mean"])) if len(loss["mean"]) <= 24 else range(0, len(loss["mean"]), 4))
    axes.set(xlabel="layer, from the input", ylabel=f"{loss['loss']} loss")


def _draw_answers(axes: "Axes", entry: dict[str, Any]) -> None:
    answers = entry["attention_on_answers"]
    if not _titled(axes, "weight on the slot that holds the answer", absent=answers.get("absent")):
        return
    heads = [(f"{i}.{h}", weights) for i, layer in enumerate(answers["weight"]) for h, weights in enumerate(layer)]
    axes.grid(False)
    image = np.array([weights for _, weights in heads], dtype=float)  # None becomes NaN, which is left white
    shown = axes.imshow(image, aspect="auto", cmap="magma", vmin=0)
    ends = [bucket["to"] for bucket in answers["buckets"]]
    axes.set_xticks([place + 0.5 for place in range(len(ends))], ends)
    axes.set_yticks(range(len(heads)), [name for name, _ in heads])
    axes.set(xlabel="steps since it was last seen", ylabel="layer.head")
    axes.figure.colorbar(shown, ax=axes)


def _draw_heads(axes: "list[Axes]", entry: dict[str, Any]) -> None:
    """Draw the distributions of all heads over distances, of the whole score and of each of its terms.

    axes: one for the whole score, then one for each term of the paper. A row is a head, a column a distance, nearest at
    the left. All have the same scale of grey, so that a term that is flat by itself looks flat.
    """
    figures = entry["attention_by_head"]
    slots = np.maximum(figures["slots"], 1e-9)
    every = [figures, *figures["terms"].values()]
    highest = max(float((np.array(values["weight"]) / slots).max()) for values in every)
    panels = [("all terms", figures), *((f"({i}) {TERMS[i]}", figures["terms"].get(i)) for i in TERMS)]
    for panel, (title, values) in zip(axes, panels, strict=True):
        if not _titled(panel, title, absent=None if values else "this score has no such term"):
            continue
        per_slot = np.array(values["weight"]) / slots
        num_layers, num_heads, num_buckets = per_slot.shape
        _grey_image(panel, per_slot.reshape(-1, num_buckets), highest=highest)
        for layer in range(1, num_layers):
            panel.axhline(layer * num_heads - 0.5, color="white", linewidth=0.5)
        panel.set_yticks([i * num_heads for i in range(num_layers)], [str(i) for i in range(num_layers)])
        step = max(1, num_buckets // 4)
        panel.set_xticks(range(0, num_buckets, step), [b["from"] for b in figures["buckets"][::step]])
        panel.set_xlabel("steps back")
    axes[0].set_ylabel("head of layer")


def _draw_widest(axes: "list[Axes]", entry: dict[str, Any]) -> None:
    """Draw the heads that look furthest: a row is a query, a column some slots; the top fifth is marked in red."""
    widest = entry["attention_by_head"]["widest"]
    for panel in axes[len(widest) :]:
        panel.set_axis_off()
    for panel, head in zip(axes, widest, strict=False):
        weight = np.array(head["weight"])
        _grey_image(panel, weight, highest=float(weight.max()))
        rows, columns = np.nonzero(weight > np.quantile(weight, 1 - _TOP))
        panel.scatter(columns, rows, s=4, color="#c8102e", linewidths=0)
        panel.set_title(f"layer {head['layer']} head {head['head']}, {head['mean_distance']:.0f} steps back on average")
        panel.set(xticks=[], yticks=[], xlabel="slots, oldest first; red: the highest fifth")
    axes[0].set_ylabel("last queries of a window")


def _grey_image(axes: "Axes", values: np.ndarray, *, highest: float) -> None:
    axes.grid(False)
    lowest = highest * _CONTRAST
    clipped = np.maximum(values, lowest)
    axes.imshow(clipped, aspect="auto", interpolation="nearest", cmap="Greys", norm="log", vmin=lowest, vmax=highest)


def _draw_nats(axes: "Axes", figures: dict[str, Any]) -> None:
    context, unit = figures["effective_context"], figures["unit"]
    if not _titled(axes, "NLL by context length", absent=context.get("absent")):
        return
    for entry, nats in zip(figures["runs"], context["nats_by_length"], strict=True):
        axes.plot(context["lengths"], nats, marker="o", markersize=3, label=entry["label"])
    axes.set(xlabel=f"{unit}s of context", ylabel=f"nats per {unit}")
    axes.legend()


def _draw_gains(axes: "Axes", figures: dict[str, Any]) -> None:
    context = figures["effective_context"]
    title = f"relative gain of one more step, r={_RATIO}"
    if not _titled(axes, title, absent=context.get("absent")):
        return
    for entry, result in zip(figures["runs"], context["by_ratio"][_RATIO], strict=True):
        recl = f"{'> ' if result['reached_limit'] else ''}{result['recl']}"
        axes.plot(
            context["lengths"][:-1], result["gains"], marker="o", markersize=3, label=f"{entry['label']}: RECL {recl}"
        )
    axes.axhline(context["threshold"], color="0.4", linewidth=0.8, linestyle="--")
    axes.set(xlabel=f"{figures['unit']}s of context", ylabel="share of perplexity")
    axes.set_ylim(bottom=0)
    axes.legend()
