"""What a study reports of a table of a paper: a figure for each row, beside the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recipes.metrics import UNITS
from recipes.studies.report import SIZES, TEST, Config, Figures, Report, Runs, as_table, slots
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.panels import COLOURS, panels

_VALID = "valid"
_LONGER = (0.5, 1, 2, 4)  # sizes of memory that are tried, as shares of the one in training
_STRIDE = 8  # a model without memory scores the last window / 8 tokens of each window, the others are context


class Row(NamedTuple):
    """A row of a table."""

    candidates: Mapping[str, str]  # label of a setting -> what it is called within the row
    published: Sequence[float]  # the paper's figure, and the one with the best memory if it has both


@dataclass(frozen=True)
class Rows(Report):
    """For each row the candidate that is best on the validation split, and what it gives on the test split.

    Table 5 of Rae et al. 2019 has compression rates as candidates.
    """

    rows: Mapping[str, Row]
    published_as: str  # what the paper's figures are
    # Whether models without memory are scored in windows that overlap, and others also with the memory that is best on
    # validation, as where Dai et al. 2019 take parts of a model away (Tables 6 and 7)
    by_attention: bool = False

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        model = config["model"]
        if not self.by_attention:
            return {_VALID: ["evaluate", "--split", "valid"], TEST: ["evaluate"]}
        if (memory := slots(config, "memory")) == 0:
            return {TEST: ["evaluate", "--stride", str(max(1, model["window"] // _STRIDE))]}
        sizes = ",".join(str(max(1, round(share * memory))) for share in _LONGER)
        return {TEST: ["evaluate"], SIZES: ["sweep", "--memory", sizes]}

    def read(self, run_dir: Path, scores: Mapping[str, Any]) -> Figures:
        return scores

    def summarise(self, runs: Runs) -> dict[str, Any]:
        known = next(iter(runs.values()))[0][TEST]
        headline, rows = known["headline"], {}
        for name, (candidates, published) in self.rows.items():
            valid = {
                label: mean_and_interval([run[_VALID][headline] for run in runs[label]])
                for label in candidates
                if not self.by_attention
            }
            best = min(candidates, key=lambda label: valid[label]["mean"] if valid else 0)
            longer = [run[SIZES]["chosen"] for run in runs[best] if SIZES in run]
            rows[name] = {
                "best": candidates[best],
                "valid": {candidates[label]: figure for label, figure in valid.items()},
                "test": mean_and_interval([run[TEST][headline] for run in runs[best]]),
                "best_memory": [figures["memory"] for figures in longer],
                "test_with_best_memory": mean_and_interval([f[headline] for f in longer]) if longer else None,
                "num_parameters": runs[best][0][TEST]["num_parameters"],
                "train_tokens_seen": runs[best][0][TEST]["train_tokens_seen"],
                "published": list(published),
            }
        return {"headline": headline, "recipe": known["recipe"], "published_as": self.published_as, "rows": rows}

    def table(self, summary: Figures) -> str:
        rows = []
        for name, entry in summary["rows"].items():
            row = {"setting": name, **{f"valid, {each}": f"{v['mean']:.4f}" for each, v in entry["valid"].items()}}
            if not self.by_attention:
                row["best"] = entry["best"]
            row[f"test, {UNITS[summary['headline']]}"] = shown(entry["test"])
            if self.by_attention:
                longer = entry["test_with_best_memory"]
                row["best memory"] = " or ".join(map(str, sorted(set(entry["best_memory"])))) or "-"
                row["test with it"] = shown(longer) if longer else "-"
                row["parameters"] = f"{entry['num_parameters']:,}"
            row["paper"] = ", ".join(f"{value:g}" for value in entry["published"])
            rows.append(row)
        return as_table(rows, f"ours on {summary['recipe']}; the paper's are {self.published_as}")

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        """Each row's mean and seeds with what was best, and the paper's figure in a panel of its own."""
        places = np.arange(len(summary["rows"]))[::-1]
        with panels(path, 2, size=(5.5, 1 + 0.45 * len(places)), sharey=True) as (ours, paper):
            for place, entry in zip(places, summary["rows"].values(), strict=True):
                mean, seeds = entry["test"]["mean"], entry["test"]["seeds"]
                ours.plot(seeds, [place] * len(seeds), marker="o", linestyle="", color=COLOURS[0], alpha=0.4)
                ours.plot([mean], [place], marker="D", color=COLOURS[0])
                ours.annotate(entry["best"], (mean, place), (0, 6), textcoords="offset points", fontsize=7)
                paper.plot(entry["published"][:1], [place], marker="D", color=COLOURS[1])
            ours.set_yticks(places, list(summary["rows"]))
            ours.set_title(f"here, on {summary['recipe']}")
            ours.set_xlabel(f"test, {UNITS[summary['headline']]}")
            paper.set_title("in the paper")
            paper.set_xlabel(self.published_as.partition(" as trained")[0])
            for axes in (ours, paper):
                axes.margins(0.1)  # room for the notes of the outermost
