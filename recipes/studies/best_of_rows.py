"""What a study of a table reports whose rows each have several candidates, as Table 5 of Rae et al. 2019 has rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.metrics import UNITS
from recipes.studies.report import Config, Figures, Runs
from waveform.runs.seeds import mean_and_interval, shown
from waveform.system.console import table
from waveform.system.output import write_png

_VALID, _TEST = "validation.json", "evaluation.json"


@dataclass(frozen=True)
class BestOfRows:
    """For each row the candidate that is best on the validation split, and what it gives on the test split."""

    rows: Mapping[str, Mapping[str, str]]  # row -> label of a setting -> what it is called within the row
    published: Mapping[str, float]  # row -> the paper's figure
    published_as: str  # what these are

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        return {_VALID: ["evaluate", "--split", "valid"], _TEST: ["evaluate"]}

    def read(self, run_dir: Path, files: Mapping[str, Any]) -> Figures:
        return {"valid": files[_VALID], "test": files[_TEST]}

    def summarise(self, runs: Runs) -> dict[str, Any]:
        first = next(iter(runs.values()))[0]["test"]
        headline = first["headline"]
        rows = {}
        for row, candidates in self.rows.items():
            valid = {
                name: mean_and_interval([run["valid"][headline] for run in runs[label]])
                for label, name in candidates.items()
            }
            best = min(valid, key=lambda name: valid[name]["mean"])
            label = next(label for label, name in candidates.items() if name == best)
            rows[row] = {
                "best": best,
                "valid": valid,
                "test": mean_and_interval([run["test"][headline] for run in runs[label]]),
                "num_parameters": runs[label][0]["test"]["num_parameters"],
                "train_tokens_seen": runs[label][0]["test"]["train_tokens_seen"],
                "published": self.published[row],
            }
        return {"headline": headline, "recipe": first["recipe"], "published_as": self.published_as, "rows": rows}

    def table(self, summary: Figures) -> str:
        unit = UNITS[summary["headline"]]
        names = [name for name in next(iter(summary["rows"].values()))["valid"]]
        header = ["setting", *(f"valid, {name}" for name in names), "best", f"test, {unit}", "paper"]
        rows = [
            [
                row,
                *(f"{entry['valid'][name]['mean']:.4f}" for name in names),
                entry["best"],
                shown(entry["test"]),
                f"{entry['published']:g}",
            ]
            for row, entry in summary["rows"].items()
        ]
        return "\n".join([*table(header, rows), f"ours on {summary['recipe']}; the paper's are {self.published_as}"])

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        from matplotlib.figure import Figure

        rows = list(summary["rows"])
        places = np.arange(len(rows))[::-1]
        figure = Figure(figsize=(11, 1 + 0.45 * len(rows)), dpi=110, layout="constrained")
        ours, paper = figure.subplots(1, 2, sharey=True)
        for place, entry in zip(places, summary["rows"].values(), strict=True):
            seeds = entry["test"]["seeds"]
            ours.plot(seeds, [place] * len(seeds), marker="o", linestyle="", color="#30578f", alpha=0.4)
            ours.plot([entry["test"]["mean"]], [place], marker="D", color="#30578f")
            ours.annotate(entry["best"], (entry["test"]["mean"], place), (0, 6), textcoords="offset points", fontsize=7)
            paper.plot([entry["published"]], [place], marker="D", color="#8a3b12")
        ours.set_yticks(places, rows)
        ours.set_title(f"here, on {summary['recipe']}", loc="left", fontsize=10)
        ours.set_xlabel(f"test, {UNITS[summary['headline']]}", fontsize=9)
        paper.set_title("in the paper", loc="left", fontsize=10)
        paper.set_xlabel(self.published_as, fontsize=9)
        for axes in (ours, paper):
            axes.margins(0.1)  # room for the labels of the outermost
            axes.grid(color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.tick_params(labelsize=8)
        write_png(path, figure)
