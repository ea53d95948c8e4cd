"""What a study of recall reports: bits per answer by distance, for each setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.plots import Curve, save_recall
from recipes.studies.report import Config, Figures, Runs
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import table

_FILE = "evaluation.json"


@dataclass(frozen=True)
class ByDistance:
    """A row for each setting; a panel of the picture for each question."""

    panels: Mapping[str, Mapping[str, str]]  # title -> label -> what the panel calls it

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        return {_FILE: ["evaluate"]}

    def read(self, run_dir: Path, files: Mapping[str, Any]) -> Figures:
        figures: Figures = files[_FILE]
        return figures

    def summarise(self, runs: Runs) -> dict[str, Any]:
        return {label: _summary(seeds) for label, seeds in runs.items()}

    def table(self, summary: Figures) -> str:
        first = next(iter(summary.values()))
        distances = [f"to {bucket['to']}" for bucket in first["bits_by_distance"]]
        header = ["setting", "bits per answer [95% interval]", *distances, "parameters"]
        rows = [
            [
                label,
                shown(entry["bits_per_answer"], decimals=3),
                *(f"{bucket['mean']:.2f}" for bucket in entry["bits_by_distance"]),
                f"{entry['num_parameters']:,}",
            ]
            for label, entry in summary.items()
        ]
        return "\n".join(
            [
                *table(header, rows),
                f"bits per answer by the steps since its fact was last seen; chance is {first['chance_bits']:.2f} "
                f"bits; means of {len(first['train_seconds'])} seeds",
            ]
        )

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        save_recall(
            path,
            [
                (title, [Curve(name, runs[label]) for label, name in named.items()])
                for title, named in self.panels.items()
            ],
        )


def _summary(seeds: Sequence[Figures]) -> dict[str, Any]:
    first = seeds[0]
    headline = first["headline"]
    return {
        "model": first["model"],
        "num_parameters": first["num_parameters"],
        "train_seconds": [run["train_seconds"] for run in seeds],
        "train_tokens_seen": first["train_tokens_seen"],
        headline: mean_and_interval([run[headline] for run in seeds]),
        "chance_bits": first["chance_bits"],
        "bits_by_distance": [
            {
                "from": bucket["from"],
                "to": bucket["to"],
                "num_answers": bucket["num_answers"],
                **mean_and_interval([run["bits_by_distance"][i]["bits"] for run in seeds]),
            }
            for i, bucket in enumerate(first["bits_by_distance"])
        ],
    }
