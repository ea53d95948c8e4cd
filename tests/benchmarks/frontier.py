"""Draws test NLL against training time: what each model reaches with each budget.

    python -m tests.benchmarks.frontier RACE.json ... --plot FRONTIER.png

The files are what `waveform race --json` and `waveform compare --json` wrote; a point is a run, a line goes through the
means over seeds.
"""

import json
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from waveform.system.panels import panels


def points(figures: Sequence[Any]) -> dict[str, dict[float, list[float]]]:
    """Test NLL of every run, nats per sample, by model and budget in minutes."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in figures:
        for run in file["runs"] if isinstance(file, dict) else file:
            minutes = round(run["train_seconds"] / 60)
            found[run["model"]][minutes].append(run["nats_per_token"])
    return {model: dict(sorted(budgets.items())) for model, budgets in found.items()}


def draw(path: Path, figures: Sequence[Any]) -> None:
    """Write the picture."""
    found = points(figures)
    with panels(path, 1, size=(5.4, 3.8)) as (axes,):
        for i, (model, budgets) in enumerate(found.items()):
            axes.plot(list(budgets), [np.mean(nats) for nats in budgets.values()], color=f"C{i}", label=model)
            for minutes, nats in budgets.items():
                axes.plot([minutes] * len(nats), nats, "o", markersize=4, alpha=0.6, color=f"C{i}")
        ticks = sorted({minutes for budgets in found.values() for minutes in budgets})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("minutes of training on one core")
        axes.set_ylabel("test NLL, nats per sample")
        axes.legend()


if __name__ == "__main__":
    parser = ArgumentParser(description="Draw test NLL against training time.")
    parser.add_argument("files", nargs="+", type=Path, metavar="RACE.json")
    parser.add_argument("--plot", type=Path, required=True, metavar="FRONTIER.png")
    given = parser.parse_args()
    draw(given.plot, [json.loads(file.read_bytes()) for file in given.files])
