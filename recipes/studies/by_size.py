"""What a study of memory at evaluation reports (Rae et al. 2019, Tables 8 and 9): the size is chosen on validation.

The paper's sizes are scaled to what a run was trained with, so that a study of a small model shows the same shares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.metrics import UNITS
from recipes.studies.report import Config, Figures, Runs
from waveform.runs.folder import read_config
from waveform.runs.statistics import mean_and_interval, shown
from waveform.system.console import table
from waveform.system.panels import COLOURS, panels

_FILE = "sizes.json"


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
class BySize:
    """For each model the figures by size, and the best size's on the test split."""

    sizes: Mapping[str, Sizes]  # by the model's registered name
    published: Mapping[int, float]  # compressed slots -> the paper's figure
    published_as: str  # what these are

    def commands(self, config: Config) -> Mapping[str, Sequence[str]]:
        model = config["model"]
        sizes = self.sizes[model["name"]]
        tried = ",".join(map(str, sizes.scaled(model[sizes.field])))
        return {_FILE: ["sweep", f"--{sizes.field}", tried]}

    def read(self, run_dir: Path, files: Mapping[str, Any]) -> Figures:
        return {**files[_FILE], "trained_with": read_config(run_dir)["model"]}

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
        unit = UNITS[summary["headline"]]
        rows = []
        for label, entry in summary["models"].items():
            for i, at in enumerate(entry["valid"]):
                size = f"{at['size']} {entry['swept']} slots" + (", as trained" * (at["size"] == entry["trained"]))
                rows.append([label if i == 0 else "", size, shown(at), ""])
            chosen = " or ".join(str(size) for size in sorted(set(entry["chosen"])))
            rows.append(["", f"chosen: {chosen}", "", shown(entry["test"])])
        header = ["model", "at evaluation", f"valid, {unit}", "test"]
        paper = ", ".join(f"{size}: {value:g}" for size, value in summary["published"].items())
        lines = [*table(header, rows), f"ours on {summary['recipe']}; the paper, {self.published_as}: {paper}"]
        return "\n".join(lines)

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
