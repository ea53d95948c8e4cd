"""What a study of curves reports: by distance, by size of memory at evaluation, or by step of training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.metrics import UNITS
from recipes.plots import save_recall
from recipes.studies.report import SIZES, TEST, Config, Figures, Report, Runs, as_table, slots
from waveform.engine.metrics import read_metrics
from waveform.runs.folder import read_config
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.errors import UserError
from waveform.system.panels import COLOURS, panels

_BEGINNING = 0.1  # share of the steps whose fall is cut off in the picture, or nothing else would be seen
_END = 0.1  # share of the steps over which training NLL is averaged, at the end


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
    """What the paper tried of one model."""

    field: str  # memory | compressed
    trained: int  # slots in training
    tried: tuple[int, ...]  # slots at evaluation

    def scaled(self, trained: int) -> list[int]:
        """The same shares of a model that was trained with another number of slots, and that number itself."""
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
            ours.set_xlabel("slots at evaluation")
            ours.set_ylabel(UNITS[summary["headline"]])
            paper.plot(list(self.published), list(self.published.values()), marker="o", color=COLOURS[1])
            paper.set_title("in the paper")
            paper.set_xlabel("slots of compressed memory at evaluation")
            paper.set_ylabel(self.published_as)


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
        # Of runs that a limit of time ended, some have more records.
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
            axes.set_xlabel("steps")
            axes.set_ylabel("training, bits per token")
            axes.legend()


def _at_the_end(run: Figures) -> float:
    """Mean bits per token over the last records of training."""
    steps, bits = np.array(run["train_steps"]), np.array(run["train_bits"])
    return float(bits[steps > (1 - _END) * steps[-1]].mean())
