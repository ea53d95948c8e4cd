"""What a study of a table reports whose rows each have several candidates, as Table 5 of Rae et al. 2019 has rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.metrics import UNITS
from recipes.studies.report import Config, Figures, Runs
from recipes.studies.rows_plot import Row, save_rows
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import table

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
        rows = [
            Row(row, entry["test"], entry["published"], note=entry["best"]) for row, entry in summary["rows"].items()
        ]
        unit = UNITS[summary["headline"]]
        save_rows(path, rows, recipe=summary["recipe"], unit=unit, published_as=self.published_as)
