"""What studies report of their runs: which evaluations they need, and the figures, table and picture made from them.

`Rows` is a table of a paper; curves are `ByDistance`, `BySize` of memory at evaluation, and `InTraining` by step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recipes.metrics import UNITS
from recipes.plots import save_recall
from waveform.engine.metrics import read_metrics
from waveform.runs.folder import read_config
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import as_table
from waveform.system.errors import UserError
from waveform.system.panels import COLOURS, panels

VALID, TEST, SIZES = "valid", "test", "sizes"  # what `evaluate` and `sweep` found
_LONGER = (0.5, 1, 2, 4)  # sizes of memory that are tried, as shares of the one in training
_STRIDE = 8  # a model without memory scores the last window / 8 tokens of each window, the others are context
_BEGINNING = 0.1  # share of the steps that the picture leaves out, because their steep fall would flatten the rest
_END = 0.1  # share of the steps over which training NLL is averaged, at the end

Config = Mapping[str, Any]  # resolved, as in a run's config.yaml
Figures = Mapping[str, Any]
# What was read of the runs of each setting, by its label and then by seed.
Runs = Mapping[str, Sequence[Figures]]


def slots(config: Config, field: str) -> int:
    """A size of memory that a study scales. Raises UserError for a list, which it cannot scale."""
    size = config["model"][field]
    if isinstance(size, list):
        raise UserError(f"model.{field} is {size}; a study needs one number for all layers")
    return int(size)


class Report(ABC):
    """One kind of report; a study has its own, with the paper's figures in it."""

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        """How to score a run: a name for the figures -> a verb and its options."""
        return {TEST: ["evaluate"]}

    def read(self, run_dir: Path, scores: Mapping[str, Any]) -> Figures:
        """The figures of one run, from what `commands` found."""
        return dict(scores[TEST])

    @abstractmethod
    def summarise(self, runs: Runs) -> dict[str, Any]:
        """The figures of the whole study over its seeds, for JSON, `table` and `draw`."""

    def beside(self, runs: Runs) -> dict[str, Any]:
        """What else the JSON says of the study."""
        return {}

    @abstractmethod
    def table(self, summary: Figures) -> str:
        """The summary as text, with the paper's figures beside ours."""

    @abstractmethod
    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        """Draw it as a PNG, with the paper's figures beside ours. Raises UserError if it cannot be written."""


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
    # validation, as in the ablations of Dai et al. 2019 (Tables 6 and 7)
    by_attention: bool = False

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        model = config["model"]
        if not self.by_attention:
            return {VALID: ["evaluate", "--split", "valid"], TEST: ["evaluate"]}
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
            chosen_from = {} if self.by_attention else candidates
            valid = {label: mean_and_interval([run[VALID][headline] for run in runs[label]]) for label in chosen_from}
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
        """Draw each row's mean and seeds, with what was best, and the paper's figure in a panel of its own."""
        places = np.arange(len(summary["rows"]))[::-1]
        with panels(path, 2, size=(5.5, 1 + 0.45 * len(places)), sharey=True) as (ours, paper):
            for place, entry in zip(places, summary["rows"].values(), strict=True):
                mean, seeds = entry["test"]["mean"], entry["test"]["seeds"]
                ours.plot(seeds, [place] * len(seeds), marker="o", linestyle="", color=COLOURS[0], alpha=0.4)
                ours.plot([mean], [place], marker="D", color=COLOURS[0])
                ours.annotate(entry["best"], (mean, place), (0, 6), textcoords="offset points", fontsize=7)
                paper.plot(entry["published"][:1], [place], marker="D", color=COLOURS[1])
            ours.set_yticks(places, list(summary["rows"]))
            ours.set(title=f"here, on {summary['recipe']}", xlabel=f"test, {UNITS[summary['headline']]}")
            paper.set(title="in the paper", xlabel=self.published_as.partition(" as trained")[0])
            for axes in (ours, paper):
                axes.margins(0.1)  # room for the notes of the outermost


@dataclass(frozen=True)
class ByDistance(Report):
    """What a study of recall reports: bits per answer by distance; a panel of the picture for each question."""

    panels: Mapping[str, Mapping[str, str]]  # title -> label -> what the panel calls it

    def summarise(self, runs: Runs) -> dict[str, Any]:
        return {label: _summary(seeds) for label, seeds in runs.items()}

    def table(self, summary: Figures) -> str:
        rows = [
            {
                "setting": label,
                "bits per answer [95% interval]": shown(entry["bits_per_answer"], decimals=3),
                **{f"to {bucket['to']}": f"{bucket['mean']:.2f}" for bucket in entry["bits_by_distance"]},
                "parameters": f"{entry['num_parameters']:,}",
            }
            for label, entry in summary.items()
        ]
        first = next(iter(summary.values()))
        return as_table(
            rows,
            f"bits per answer by the steps since its fact was last seen; chance is {first['chance_bits']:.2f} bits; "
            f"means of {len(first['train_seconds'])} seeds",
        )

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        save_recall(path, {t: {name: runs[label] for label, name in named.items()} for t, named in self.panels.items()})


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


@dataclass(frozen=True)
class Sizes:
    """The sizes of memory that the paper tried for one model."""

    field: str  # memory | compressed
    trained: int  # slots in training
    tried: tuple[int, ...]  # slots at evaluation

    def scaled(self, trained: int) -> list[int]:
        """The same shares of another number of slots in training, and that number itself."""
        return sorted({trained, *(max(1, round(trained * size / self.trained)) for size in self.tried)})


@dataclass(frozen=True)
class BySize(Report):
    """For each model the figures by size of memory at evaluation, and on the test split that of the best on validation.

    The sizes of Rae et al. 2019, Tables 8 and 9, are scaled to what a run was trained with, so that a study of a small
    model shows the same shares.
    """

    sizes: Mapping[str, Sizes]  # by the model's registered name
    published: Mapping[int, float]  # compressed slots -> the paper's figure
    published_as: str  # what these are

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        sizes = self.sizes[config["model"]["name"]]
        tried = ",".join(map(str, sizes.scaled(slots(config, sizes.field))))
        return {SIZES: ["sweep", f"--{sizes.field}", tried]}

    def read(self, run_dir: Path, scores: Mapping[str, Any]) -> Figures:
        return {**scores[SIZES], "trained_with": read_config(run_dir)["model"]}

    def summarise(self, runs: Runs) -> dict[str, Any]:
        first = next(iter(runs.values()))[0]["chosen"]
        headline = first["headline"]
        models = {}
        for label, seeds in runs.items():
            field = self.sizes[seeds[0]["chosen"]["model"]].field
            models[label] = {
                "swept": field,
                "trained": seeds[0]["trained_with"][field],
                "valid": [
                    {"size": entry[field], **mean_and_interval([run["sizes"][i][headline] for run in seeds])}
                    for i, entry in enumerate(seeds[0]["sizes"])
                ],
                "chosen": [run["chosen"][field] for run in seeds],
                "test": mean_and_interval([run["chosen"][headline] for run in seeds]),
                "num_parameters": seeds[0]["chosen"]["num_parameters"],
                "train_tokens_seen": seeds[0]["chosen"]["train_tokens_seen"],
            }
        return {
            "headline": headline,
            "recipe": first["recipe"],
            "models": models,
            "published": {str(size): value for size, value in self.published.items()},
            "published_as": self.published_as,
        }

    def table(self, summary: Figures) -> str:
        rows, valid = [], f"valid, {UNITS[summary['headline']]}"
        for label, entry in summary["models"].items():
            for i, at in enumerate(entry["valid"]):
                size = f"{at['size']} {entry['swept']} slots" + (", as trained" * (at["size"] == entry["trained"]))
                rows.append({"model": label * (i == 0), "at evaluation": size, valid: shown(at), "test": ""})
            chosen = " or ".join(str(size) for size in sorted(set(entry["chosen"])))
            rows.append({"model": "", "at evaluation": f"chosen: {chosen}", valid: "", "test": shown(entry["test"])})
        paper = ", ".join(f"{size}: {value:g}" for size, value in summary["published"].items())
        return as_table(rows, f"ours on {summary['recipe']}; the paper, {self.published_as}: {paper}")

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        with panels(path, 2, size=(5.5, 4)) as (ours, paper):
            for label, entry in summary["models"].items():
                sizes, nats = zip(*((at["size"], at["mean"]) for at in entry["valid"]), strict=True)
                (line,) = ours.plot(sizes, nats, marker="o", label=f"{label}, {entry['swept']}, valid")
                best, colour = (entry["chosen"], entry["test"]["seeds"]), line.get_color()
                name = f"{label}, the best, test"
                ours.plot(*best, marker="*", markersize=11, linestyle="", color=colour, label=name)
            ours.legend()
            ours.set_title(f"here, on {summary['recipe']}")
            ours.set(xlabel="slots at evaluation", ylabel=UNITS[summary["headline"]])
            paper.plot(list(self.published), list(self.published.values()), marker="o", color=COLOURS[1])
            paper.set(title="in the paper", xlabel="slots of compressed memory at evaluation", ylabel=self.published_as)


@dataclass(frozen=True)
class InTraining(Report):
    """Training NLL by step: a curve for each setting, as Figure 3 of Rae et al. 2019 has them."""

    labels: Mapping[str, str]  # label of a setting -> what its curve is called
    published_as: str  # what the paper's curves show, of which it gives no figures

    def read(self, run_dir: Path, scores: Mapping[str, Any]) -> Figures:
        logged = [record for record in read_metrics(run_dir) if record["kind"] == "train"]
        if not logged:
            raise UserError(f"{run_dir} has no record of training to draw; train anew with a lower train.log_every")
        return {
            **scores[TEST],
            "train_steps": [record["step"] for record in logged],
            "train_bits": [record["nll_bits"] for record in logged],
        }

    def summarise(self, runs: Runs) -> dict[str, Any]:
        first = next(iter(runs.values()))[0]
        headline = first["headline"]
        # If a limit of time ended the runs, some have more records.
        shortest = {label: min(len(run["train_steps"]) for run in seeds) for label, seeds in runs.items()}
        return {
            "headline": headline,
            "recipe": first["recipe"],
            "published_as": self.published_as,
            "variants": {
                label: {
                    "train_bits_at_the_end": mean_and_interval([_at_the_end(run) for run in seeds]),
                    headline: mean_and_interval([run[headline] for run in seeds]),
                    "train_steps": seeds[0]["train_steps"][: shortest[label]],
                    "train_bits": np.mean([run["train_bits"][: shortest[label]] for run in seeds], axis=0).tolist(),
                }
                for label, seeds in runs.items()
            },
        }

    def table(self, summary: Figures) -> str:
        headline = summary["headline"]
        rows = [
            {
                "setting": self.labels[label],
                f"training, last {_END:.0%}, bits per token": shown(entry["train_bits_at_the_end"]),
                f"test, {UNITS[headline]}": shown(entry[headline]),
            }
            for label, entry in summary["variants"].items()
        ]
        return as_table(rows, f"ours on {summary['recipe']}; the paper: {self.published_as}")

    def draw(self, path: Path, summary: Figures, runs: Runs) -> None:
        with panels(path, 1, size=(9, 4.6)) as (axes,):
            for label, entry in summary["variants"].items():
                steps, bits = np.array(entry["train_steps"]), np.array(entry["train_bits"])
                shown_steps = steps > _BEGINNING * steps[-1]
                axes.plot(steps[shown_steps], bits[shown_steps], label=self.labels[label])
            axes.set_title(f"here, on {summary['recipe']}; the paper: {self.published_as}")
            axes.set(xlabel="steps", ylabel="training, bits per token")
            axes.legend()


def _at_the_end(run: Figures) -> float:
    """Mean bits per token over the last records of training."""
    steps, bits = np.array(run["train_steps"]), np.array(run["train_bits"])
    return float(bits[steps > (1 - _END) * steps[-1]].mean())
