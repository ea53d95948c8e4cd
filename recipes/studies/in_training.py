"""What a study of training itself reports: training NLL by step, as Figure 3 of Rae et al. 2019 draws it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.metrics import UNITS
from recipes.studies.report import Config, Figures, Runs
from waveform.engine.metrics import read_metrics
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import table
from waveform.system.panels import panels

_FILE = "evaluation.json"
_BEGINNING = 0.1  # share of the steps whose fall is cut off in the picture, or nothing else would be seen
_END = 0.1  # share of the steps over which training NLL is averaged, at the end


@dataclass(frozen=True)
class InTraining:
    """A curve for each setting."""

    labels: Mapping[str, str]  # label of a setting -> what its curve is called
    published_as: str  # what the paper's curves show, of which it gives no figures

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        return {_FILE: ["evaluate"]}

    def read(self, run_dir: Path, files: Mapping[str, Any]) -> Figures:
        logged = [record for record in read_metrics(run_dir) if record["kind"] == "train"]
        return {
            **files[_FILE],
            "train_steps": [record["step"] for record in logged],
            "train_bits": [record["nll_bits"] for record in logged],
        }

    def summarise(self, runs: Runs) -> dict[str, Any]:
        first = next(iter(runs.values()))[0]
        headline = first["headline"]
        return {
            "headline": headline,
            "recipe": first["recipe"],
            "published_as": self.published_as,
            "variants": {
                label: {
                    "train_bits_at_the_end": mean_and_interval([_at_the_end(run) for run in seeds]),
                    headline: mean_and_interval([run[headline] for run in seeds]),
                    "train_steps": seeds[0]["train_steps"],
                    "train_bits": np.mean([run["train_bits"] for run in seeds], axis=0).tolist(),
                }
                for label, seeds in runs.items()
            },
        }

    def table(self, summary: Figures) -> str:
        headline = summary["headline"]
        header = ["setting", f"training, last {_END:.0%}, bits per token", f"test, {UNITS[headline]}"]
        rows = [
            [self.labels[label], shown(entry["train_bits_at_the_end"]), shown(entry[headline])]
            for label, entry in summary["variants"].items()
        ]
        return "\n".join([*table(header, rows), f"ours on {summary['recipe']}; the paper: {self.published_as}"])

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        with panels(path, 1, size=(9, 4.6)) as (axes,):
            for label, entry in summary["variants"].items():
                steps, bits = np.array(entry["train_steps"]), np.array(entry["train_bits"])
                shown_steps = steps > _BEGINNING * steps[-1]
                axes.plot(steps[shown_steps], bits[shown_steps], label=self.labels[label])
            axes.set_title(f"here, on {summary['recipe']}; the paper: {self.published_as}")
            axes.set_xlabel("steps")
            axes.set_ylabel("training, bits per token")
            axes.legend()


def _at_the_end(run: Figures) -> float:
    """Mean bits per token over the last records of training."""
    steps, bits = np.array(run["train_steps"]), np.array(run["train_bits"])
    return float(bits[steps > (1 - _END) * steps[-1]].mean())
