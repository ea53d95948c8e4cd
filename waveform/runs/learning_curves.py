"""Validation NLL in the course of training (Rae et al. 2019, Figure 4): read from the logs of runs, and drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from waveform.system.panels import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_PANELS = 3  # updates, tokens and seconds


@dataclass(frozen=True)
class LearningCurve:
    """The evaluations of a run in training, in their order; all lists have the same length."""

    steps: Sequence[int]
    updates: Sequence[int]  # of the weights
    tokens: Sequence[float]  # scored in training so far
    seconds: Sequence[float]  # spent on training itself
    nats: Sequence[float]  # per token of the validation split, or of what `train.evaluate_tokens` takes of it


def learning_curve(records: Sequence[Mapping[str, Any]], train: Mapping[str, Any]) -> LearningCurve:
    """Read a run's validation NLL from the records of its log; train: that section of its configuration.

    Earlier versions did not record the tokens seen at an evaluation: they are interpolated between the records around
    it. A run that was trained without evaluations gives an empty curve.
    """
    evaluated = [record for record in records if record["kind"] == "evaluate"]
    known = [record for record in records if "tokens_seen" in record]
    steps = [record["step"] for record in evaluated]
    tokens = np.interp(steps, [0, *(r["step"] for r in known)], [0, *(r["tokens_seen"] for r in known)])
    return LearningCurve(
        steps=steps,
        updates=[_updates(step, train) for step in steps],
        tokens=tokens.tolist(),
        seconds=[record["seconds"] for record in evaluated],
        nats=[record["nll_nats"] for record in evaluated],
    )


def _updates(step: int, train: Mapping[str, Any]) -> int:
    """Number of updates made in the first `step` steps, by the periods of `TrainConfig.chunks_of_update`."""
    early = min(step, train["update_period_from"])
    return early + (step - early) // train["update_period"]


def save_learning_curves(
    path: Path, curves: Sequence[tuple[str, LearningCurve]], *, unit: str, scores: Sequence[tuple[str, int, float]] = ()
) -> None:
    """Draw `draw_learning_curves` into a file, and beside it test NLL against the number of parameters.

    scores: (label, number of parameters, test NLL in nats) of each run; none: no such panel. Raises UserError if the
    picture cannot be written.
    """
    with panels(path, NUM_PANELS + bool(scores), columns=NUM_PANELS + 1, size=(4.4, 4)) as every:
        colours = draw_learning_curves(every, curves, unit=unit)
        for name, num_parameters, nats in scores:
            every[-1].plot(num_parameters / 1e6, nats, marker="o", color=colours[name])
        if scores:
            every[-1].set(xlabel="parameters, millions", ylabel=f"test NLL, nats per {unit}")


def draw_learning_curves(
    every: Sequence["Axes"], curves: Sequence[tuple[str, LearningCurve]], *, unit: str
) -> dict[str, str]:
    """Draw validation NLL against updates, tokens seen and seconds: a panel each, a line for each (label, curve).

    Curves with the same label, of several seeds, have one colour. Returns colours by label. unit: a token's name.
    """
    from matplotlib.ticker import EngFormatter

    fields = {"updates": "updates", "tokens": f"{unit}s seen", "seconds": "seconds of training"}
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in curves))}
    for axes, (field, label) in zip(every, fields.items(), strict=False):
        axes.sharey(every[0])
        for name, curve in curves:
            axes.plot(getattr(curve, field), curve.nats, marker="o", markersize=3, color=colours[name])
        axes.set_xlabel(label)
        axes.locator_params(axis="x", nbins=5)
        if field != "seconds":
            axes.xaxis.set_major_formatter(EngFormatter())  # 150 k, 3 M
    for name, colour in colours.items():
        last = [curve.nats[-1] for label, curve in curves if label == name and curve.nats]
        shown = f"{np.mean(last):.3f}" if last else "no evaluations"
        every[0].plot([], [], marker="o", markersize=3, color=colour, label=f"{name}: {shown}")
    every[0].set_ylabel(f"validation NLL, nats per {unit}")
    every[0].legend()
    return colours
