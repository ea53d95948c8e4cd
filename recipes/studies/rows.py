"""What a study reports of a table of a paper: a figure for each row, beside the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.metrics import UNITS
from recipes.studies.report import SIZES, TEST, Config, Figures, Report, Runs
from recipes.tables import as_table
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.panels import COLOURS, panels

_VALID = "valid"
_NOTE = "ours on {recipe}; the paper's are {published_as}"
_LONGER = (0.5, 1, 2, 4)  # sizes of memory that are tried, as shares of the one in training
_STRIDE = 8  # a model without memory scores the last window / 8 tokens of each window, the others are context


@dataclass(frozen=True)
class Ablations(Report):
    """For each row its figure on the test split: as trained, and with the memory that is best on validation.

    Parts of a model are taken away, as in Dai et al. 2019, Tables 6 and 7.
    """

    rows: Mapping[str, str]  # label of a setting -> what its row is called
    published: Mapping[str, Sequence[float]]  # label -> the paper's figure, and the best one if it has two
    published_as: str  # what these are

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        model = config["model"]
        if model["memory"] == 0:
            return {TEST: ["evaluate", "--stride", str(max(1, model["window"] // _STRIDE))]}
        sizes = ",".join(str(max(1, round(share * model["memory"]))) for share in _LONGER)
        return {TEST: ["evaluate"], SIZES: ["sweep", "--memory", sizes]}

    def read(self, run_dir: Path, scores: Mapping[str, Any]) -> Figures:
        return {"test": scores[TEST], "best": scores[SIZES]["chosen"] if SIZES in scores else None}

    def summarise(self, runs: Runs) -> dict[str, Any]:
        summary = _summary(runs, self.published_as)
        for label, seeds in runs.items():
            best = [run["best"] for run in seeds if run["best"] is not None]
            summary["rows"][label] = {
                **_test_of(seeds),
                "best": mean_and_interval([figures[summary["headline"]] for figures in best]) if best else None,
                "best_memory": [figures["memory"] for figures in best],
                "published": list(self.published[label]),
            }
        return summary

    def table(self, summary: Figures) -> str:
        rows = [
            {
                "setting": self.rows[label],
                f"test, {UNITS[summary['headline']]}": shown(entry["test"]),
                "best memory": " or ".join(map(str, sorted(set(entry["best_memory"])))) or "-",
                "test with it": shown(entry["best"]) if entry["best"] else "-",
                "parameters": f"{entry['num_parameters']:,}",
                "paper": ", ".join(f"{value:g}" for value in entry["published"]),
            }
            for label, entry in summary["rows"].items()
        ]
        return as_table(rows, _NOTE.format(**summary))

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        rows = [
            (self.rows[label], entry["test"], entry["published"][0], "") for label, entry in summary["rows"].items()
        ]
        _save_rows(path, rows, summary, published_as=self.published_as.partition(" as trained")[0])


@dataclass(frozen=True)
class BestOfRows(Report):
    """For each row the candidate that is best on the validation split, and what it gives on the test split.

    Table 5 of Rae et al. 2019 has compression rates as candidates.
    """

    rows: Mapping[str, Mapping[str, str]]  # row -> label of a setting -> what it is called within the row
    published: Mapping[str, float]  # row -> the paper's figure
    published_as: str  # what these are

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        return {_VALID: ["evaluate", "--split", "valid"], TEST: ["evaluate"]}

    def read(self, run_dir: Path, scores: Mapping[str, Any]) -> Figures:
        return {"valid": scores[_VALID], "test": scores[TEST]}

    def summarise(self, runs: Runs) -> dict[str, Any]:
        summary = _summary(runs, self.published_as)
        for row, candidates in self.rows.items():
            valid = {
                label: mean_and_interval([run["valid"][summary["headline"]] for run in runs[label]])
                for label in candidates
            }
            best = min(valid, key=lambda label: valid[label]["mean"])
            summary["rows"][row] = {
                "best": candidates[best],
                "valid": {candidates[label]: figure for label, figure in valid.items()},
                **_test_of(runs[best]),
                "published": self.published[row],
            }
        return summary

    def table(self, summary: Figures) -> str:
        rows = [
            {
                "setting": row,
                **{f"valid, {name}": f"{valid['mean']:.4f}" for name, valid in entry["valid"].items()},
                "best": entry["best"],
                f"test, {UNITS[summary['headline']]}": shown(entry["test"]),
                "paper": f"{entry['published']:g}",
            }
            for row, entry in summary["rows"].items()
        ]
        return as_table(rows, _NOTE.format(**summary))

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        rows = [(row, entry["test"], entry["published"], entry["best"]) for row, entry in summary["rows"].items()]
        _save_rows(path, rows, summary, published_as=self.published_as)


def _summary(runs: Runs, published_as: str) -> dict[str, Any]:
    first = next(iter(runs.values()))[0]["test"]
    return {"headline": first["headline"], "recipe": first["recipe"], "published_as": published_as, "rows": {}}


def _test_of(seeds: Sequence[Figures]) -> dict[str, Any]:
    first = seeds[0]["test"]
    return {
        "test": mean_and_interval([run["test"][first["headline"]] for run in seeds]),
        "num_parameters": first["num_parameters"],
        "train_tokens_seen": first["train_tokens_seen"],
    }


def _save_rows(
    path: Path, rows: Sequence[tuple[str, Figures, float, str]], summary: Figures, *, published_as: str
) -> None:
    """Draw each row's mean and seeds, and the paper's figure in a panel of its own.

    rows: what each is called, our figure of `mean_and_interval`, the paper's, and what is written above ours.
    """
    places = np.arange(len(rows))[::-1]
    with panels(path, 2, size=(5.5, 1 + 0.45 * len(rows)), sharey=True) as (ours, paper):
        for place, (_, figure, published, note) in zip(places, rows, strict=True):
            mean, seeds = figure["mean"], figure["seeds"]
            ours.plot(seeds, [place] * len(seeds), marker="o", linestyle="", color=COLOURS[0], alpha=0.4)
            ours.plot([mean], [place], marker="D", color=COLOURS[0])
            ours.annotate(note, (mean, place), (0, 6), textcoords="offset points", fontsize=7)
            paper.plot([published], [place], marker="D", color=COLOURS[1])
        ours.set_yticks(places, [name for name, *_ in rows])
        ours.set_title(f"here, on {summary['recipe']}")
        ours.set_xlabel(f"test, {UNITS[summary['headline']]}")
        paper.set_title("in the paper")
        paper.set_xlabel(published_as)
        for axes in (ours, paper):
            axes.margins(0.1)  # room for the notes of the outermost
