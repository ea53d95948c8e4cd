"""What a study reports in which parts of a model are taken away (Dai et al. 2019, Tables 6 and 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.metrics import UNITS
from recipes.studies.report import Config, Figures, Runs
from recipes.studies.rows_plot import Row, save_rows
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import table

_TEST, _SIZES = "evaluation.json", "sizes.json"
_LONGER = (0.5, 1, 2, 4)  # sizes of memory that are tried, as shares of the one in training
_STRIDE = 8  # a model without memory scores the last window / 8 tokens of each window, the others are context


@dataclass(frozen=True)
class Ablations:
    """For each row its figure on the test split: as trained, and with the memory that is best on validation."""

    rows: Mapping[str, str]  # label of a setting -> what its row is called
    published: Mapping[str, Sequence[float]]  # label -> the paper's figure, and the best one if it has two
    published_as: str  # what these are

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        model = config["model"]
        if model["memory"] == 0:
            return {_TEST: ["evaluate", "--stride", str(max(1, model["window"] // _STRIDE))]}
        sizes = ",".join(str(max(1, round(share * model["memory"]))) for share in _LONGER)
        return {_TEST: ["evaluate"], _SIZES: ["sweep", "--memory", sizes]}

    def read(self, run_dir: Path, files: Mapping[str, Any]) -> Figures:
        return {"test": files[_TEST], "best": files[_SIZES]["chosen"] if _SIZES in files else None}

    def summarise(self, runs: Runs) -> dict[str, Any]:
        first = next(iter(runs.values()))[0]["test"]
        headline = first["headline"]
        rows = {}
        for label, seeds in runs.items():
            best = [run["best"] for run in seeds if run["best"] is not None]
            rows[label] = {
                "test": mean_and_interval([run["test"][headline] for run in seeds]),
                "best": mean_and_interval([figures[headline] for figures in best]) if best else None,
                "best_memory": [figures["memory"] for figures in best],
                "num_parameters": seeds[0]["test"]["num_parameters"],
                "train_tokens_seen": seeds[0]["test"]["train_tokens_seen"],
                "published": list(self.published[label]),
            }
        return {"headline": headline, "recipe": first["recipe"], "published_as": self.published_as, "rows": rows}

    def table(self, summary: Figures) -> str:
        header = [
            "setting",
            f"test, {UNITS[summary['headline']]}",
            "best memory",
            "test with it",
            "parameters",
            "paper",
        ]
        rows = [
            [
                self.rows[label],
                shown(entry["test"]),
                " or ".join(map(str, sorted(set(entry["best_memory"])))) or "-",
                shown(entry["best"]) if entry["best"] else "-",
                f"{entry['num_parameters']:,}",
                ", ".join(f"{value:g}" for value in entry["published"]),
            ]
            for label, entry in summary["rows"].items()
        ]
        return "\n".join([*table(header, rows), f"ours on {summary['recipe']}; the paper's are {self.published_as}"])

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        rows = [Row(self.rows[label], entry["test"], entry["published"][0]) for label, entry in summary["rows"].items()]
        published_as = self.published_as.partition(" as trained")[0]
        unit = UNITS[summary["headline"]]
        save_rows(path, rows, recipe=summary["recipe"], unit=unit, published_as=published_as)
