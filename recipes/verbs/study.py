"""`python -m recipes study`: every setting of a study, trained with several seeds, evaluated and drawn."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.plots import Curve, save_recall
from recipes.studies import find_study
from recipes.text import compose_config
from waveform.engine.dataset import read_dataset
from waveform.system.console import say, table
from waveform.system.cpu import num_cores
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.system.signals import Interrupted

_EVALUATION_FILE = "evaluation.json"  # in a run's folder, once it is trained and evaluated
_LAST_WORDS = 3  # lines of a failed child's output that are shown


@dataclass(frozen=True)
class StudyConfig:
    """How much of a study is run, and how fast."""

    seeds: int = 3  # runs of each setting
    jobs: int = 2  # runs at a time

    def __post_init__(self) -> None:
        if min(self.seeds, self.jobs) < 1:
            raise UserError(f"--seeds is {self.seeds} and --jobs is {self.jobs}; both must be at least 1")


def study(
    recipe: str,
    data_dir: Path,
    out_dir: Path,
    overrides: Sequence[str] = (),
    *,
    config: StudyConfig | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Train and evaluate each setting of the recipe's study with several seeds.

    Each run is a folder of `out_dir` and a process of its own, with its share of the CPU's threads. Run again, the
    study continues: what was trained or evaluated is not done twice. overrides: settings of every run. Prints a table
    and returns the figures by setting. Raises UserError for a recipe without a study, for settings that a run refuses,
    and if a run fails.
    """
    config, chosen = config or StudyConfig(), find_study(recipe)
    check_files(json_file=json_file, plot_file=plot_file)
    read_dataset(data_dir)
    for settings in chosen.variants.values():  # so that a wrong setting is refused at once
        compose_config(recipe, [*settings, *overrides])
    runs = [(label, seed) for seed in range(config.seeds) for label in chosen.variants]
    children = _Children(threads=max(1, num_cores() // config.jobs))

    def finish(run: tuple[str, int]) -> dict[str, Any]:
        label, seed = run
        folder = out_dir / f"{label}-{seed}"
        command = [*chosen.variants[label], *overrides, f"seed={seed}"]
        figures = _trained_and_evaluated(recipe, data_dir, folder, command, children)
        if show_progress:
            say(f"{folder}: {figures[figures['headline']]:.4f} after {figures['train_seconds']:.0f} s of training")
        return figures

    pool = ThreadPoolExecutor(config.jobs)
    try:
        every = dict(zip(runs, pool.map(finish, runs), strict=True))
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        children.terminate()
        if isinstance(error, Interrupted):
            raise Interrupted(error.number, "the same command continues the study") from error
        raise
    by_label = {label: [every[label, seed] for seed in range(config.seeds)] for label in chosen.variants}
    summary = {
        "recipe": recipe,
        "seeds": config.seeds,
        "threads_per_run": children.threads,
        "settings": {label: list(settings) for label, settings in chosen.variants.items()},
        "overrides": list(overrides),
        "data": every[runs[0]]["data_checksum"],
        "variants": {label: summarise(figures) for label, figures in by_label.items()},
    }
    if show_progress:
        print(format_table(summary))
    write_json(json_file, summary)
    if plot_file is not None:
        panels = [
            (title, [Curve(name, by_label[label]) for label, name in shown.items()])
            for title, shown in chosen.panels.items()
        ]
        save_recall(plot_file, panels)
    return summary


class _Children:
    """The processes that train and evaluate; each saves what it did if it is asked to end."""

    def __init__(self, *, threads: int) -> None:
        self.threads = threads
        self._running: set[subprocess.Popen[str]] = set()

    def call(self, *arguments: str) -> None:
        """Run `python -m recipes` with arguments, quietly. Raises UserError with its last lines if it fails."""
        child = subprocess.Popen(
            [sys.executable, "-m", "recipes", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it through `terminate`, and once
        )
        self._running.add(child)
        output = child.communicate()[0]
        self._running.discard(child)
        if child.returncode:
            last = " | ".join(output.strip().splitlines()[-_LAST_WORDS:])
            raise UserError(f"`recipes {' '.join(arguments)}` failed with exit code {child.returncode}: {last}")

    def terminate(self) -> None:
        """Ask all of them to end."""
        for child in tuple(self._running):
            child.terminate()


def _trained_and_evaluated(
    recipe: str, data_dir: Path, folder: Path, settings: Sequence[str], children: _Children
) -> dict[str, Any]:
    """Return what `evaluate --json` gives for a run, after training and evaluating it if need be."""
    evaluation = folder / _EVALUATION_FILE
    children.call("train", recipe, str(data_dir), str(folder), *settings)
    if not evaluation.exists():
        children.call("evaluate", str(folder), "--json", str(evaluation))
    figures: dict[str, Any] = json.loads(evaluation.read_bytes())
    return figures


def mean_and_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over seeds, with its 95% interval by Student's t (None for a single seed), and the values."""
    from scipy.stats import t as student_t

    mean, num = float(np.mean(values)), len(values)
    interval = None
    if num > 1:
        half = float(student_t.ppf(0.975, num - 1) * np.std(values, ddof=1)) / num**0.5
        interval = [mean - half, mean + half]
    return {"mean": mean, "interval_95": interval, "seeds": list(values)}


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one setting's figures over its seeds: the headline metric, by distance too, and what it took."""
    first = runs[0]
    headline = first["headline"]
    return {
        "model": first["model"],
        "num_parameters": first["num_parameters"],
        "train_seconds": [run["train_seconds"] for run in runs],
        "train_tokens_seen": first["train_tokens_seen"],
        headline: mean_and_interval([run[headline] for run in runs]),
        "chance_bits": first["chance_bits"],
        "bits_by_distance": [
            {
                "from": bucket["from"],
                "to": bucket["to"],
                "num_answers": bucket["num_answers"],
                **mean_and_interval([run["bits_by_distance"][i]["bits"] for run in runs]),
            }
            for i, bucket in enumerate(first["bits_by_distance"])
        ],
    }


def format_table(summary: Mapping[str, Any]) -> str:
    """Return bits per answer by setting: over all distances with an interval, and the mean at each distance."""
    variants = summary["variants"]
    buckets = next(iter(variants.values()))["bits_by_distance"]
    header = ["setting", "bits per answer [95% interval]", *(f"to {bucket['to']}" for bucket in buckets), "parameters"]
    rows = []
    for label, entry in variants.items():
        total = entry["bits_per_answer"]
        cell = f"{total['mean']:.3f}"
        if total["interval_95"] is not None:
            cell += " [{:.3f}, {:.3f}]".format(*total["interval_95"])
        by_distance = [f"{bucket['mean']:.2f}" for bucket in entry["bits_by_distance"]]
        rows.append([label, cell, *by_distance, f"{entry['num_parameters']:,}"])
    chance = next(iter(variants.values()))["chance_bits"]
    return "\n".join(
        [
            *table(header, rows),
            f"bits per answer by the steps since its fact was last seen; chance is {chance:.2f} bits; "
            f"means of {summary['seeds']} seeds",
        ]
    )
