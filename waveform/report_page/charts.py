"""The charts of a report: drawn by matplotlib as SVG, in colours that follow the page from light to dark.

The page contains each SVG as an image: nothing in it can be executed, whatever a label says.
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from waveform.analyses.nll_by_place import NllByPlace
from waveform.analyses.plots import draw_attention
from waveform.report_page.page import Chart, data_uri
from waveform.runs.learning_curves import NUM_PANELS, LearningCurve, draw_learning_curves
from waveform.system.panels import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of matplotlib -> colours of the page
_INKS = {"#000000": "var(--ink)", "#666666": "var(--ink)", "#e6e6e6": "var(--faint)"}
_STYLE = """<style>
:root { --ink: #222; --faint: #8884 }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd } }
text { fill: var(--ink) }
</style>"""


def learning_chart(curves: Sequence[tuple[str, LearningCurve]], *, unit: str) -> Chart | None:
    """Validation NLL in training, against updates, tokens seen and seconds; None if no training was evaluated."""
    if not any(curve.nats for _, curve in curves):
        return None
    with panels(None, NUM_PANELS) as every:
        draw_learning_curves(every, [(_plain(label), curve) for label, curve in curves], unit=unit)
        picture = _svg(every)
    note = f"Nats per {unit} of the validation split, at each run's evaluations in training; lower is better."
    return Chart("NLL in training", note, picture)


def place_chart(places: Mapping[str, NllByPlace], *, unit: str, unit_s: float | None) -> Chart:
    """NLL over the course of an utterance, and beside it the difference to the first run.

    places: label -> sums of the same tokens; unit_s: duration of a token, None if it has none.
    """
    first = next(iter(places))
    others = [label for label in places if label != first]
    piece = "document" if unit_s is None else "utterance"
    with panels(None, 1 + bool(others)) as every:
        _draw_places(every[0], {label: place.figures() for label, place in places.items()}, unit_s=unit_s)
        every[0].set_ylabel(f"NLL, nats per {unit}")
        if others:
            every[1].axhline(0, color="0.4", linewidth=0.8)
            every[1].plot([], [])  # the first run's colour
            differences = {label: places[label].minus(places[first]).figures() for label in others}
            _draw_places(every[1], differences, unit_s=unit_s)
            every[1].set_ylabel(f"difference to\n{_plain(first)}")
        for axes in every:
            axes.set_xlabel(f"{unit if unit_s is None else 'second'}s since the {piece} began")
        picture = _svg(every)
    return Chart(
        f"NLL over the course of {'a document' if unit_s is None else 'an utterance'}",
        f"Does longer memory help later on? The mean over {piece}s, in stretches that double in length, with 95% "
        f"intervals by the bootstrap over {piece}s (none for fewer than five). What comes late may be easier or harder "
        f"to predict for any model; the difference, paired by {piece}, is free of that.",
        picture,
    )


def _draw_places(axes: "Axes", lines: Mapping[str, Mapping[str, Any]], *, unit_s: float | None) -> None:
    for label, figures in lines.items():
        edges = np.array(figures["edges"], dtype=float) * (unit_s or 1)
        middles = np.sqrt(np.maximum(edges[:-1], edges[1] / 2) * edges[1:])  # the axis is logarithmic
        (line,) = axes.plot(middles, figures["nats"], marker="o", markersize=3, label=_plain(label))
        known = [(at, *interval) for at, interval in zip(middles, figures["interval_95"], strict=True) if interval]
        if known:
            axes.fill_between(*np.array(known).T, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.legend()


def attention_chart(entries: Sequence[dict[str, Any]]) -> Chart | None:
    """Attention by position of each run that has attention, from its figures by `analyse`; None if none has.

    entries: `label`, and `attention_by_position`, which is {absent: why} if there is nothing to see.
    """
    seen = [entry for entry in entries if "absent" not in entry["attention_by_position"]]
    if not seen:
        return None
    with panels(None, len(seen)) as every:
        for axes, entry in zip(every, seen, strict=True):
            draw_attention(axes, entry)
            axes.set_title(_plain(entry["label"]))
        picture = _svg(every)
    note = "The share of an average query's attention that each sixth of a region gets, oldest first, memories full."
    return Chart("Attention by position", note, picture)


def _plain(label: str) -> str:
    """Escape a label: matplotlib reads `$` as a formula, and leaves labels that begin with `_` out of a legend."""
    hidden = "\N{ZERO WIDTH SPACE}" if label.startswith("_") else ""
    return hidden + label.replace("$", r"\$")


def _svg(every: Sequence["Axes"]) -> str:
    """The figure of some panels as a data URI; its text stays text, in the page's ink."""
    from matplotlib import rc_context

    content = io.BytesIO()
    figure = every[0].get_figure(root=True)
    assert figure is not None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "waveform"}):
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    text = content.getvalue().decode()
    text = text[text.index("<svg") :]
    for colour, ink in _INKS.items():
        text = text.replace(f"fill: {colour}", f"fill: {ink}").replace(f"stroke: {colour}", f"stroke: {ink}")
    head, end, rest = text.partition(">")
    return data_uri((head + end + _STYLE + rest).encode(), kind="image/svg+xml")
