"""`python -m recipes study`: every setting of a study, trained with several seeds, evaluated and drawn."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.plots import Curve, save_recall
from recipes.studies.by_distance import format_table, summarise
from recipes.studies.catalogue import find_study
from recipes.studies.children import Children
from recipes.text import compose_config
from waveform.engine.dataset import read_dataset
from waveform.system.console import say
from waveform.system.cpu import num_cores
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json
from waveform.system.signals import Interrupted

_EVALUATION_FILE = "evaluation.json"  # in a run's folder, once it is trained and evaluated


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
    children = Children(threads=max(1, num_cores() // config.jobs))

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


def _trained_and_evaluated(
    recipe: str, data_dir: Path, folder: Path, settings: Sequence[str], children: Children
) -> dict[str, Any]:
    """Return what `evaluate --json` gives for a run, after training and evaluating it if need be."""
    evaluation = folder / _EVALUATION_FILE
    children.call("train", recipe, str(data_dir), str(folder), *settings)
    if not evaluation.exists():
        children.call("evaluate", str(folder), "--json", str(evaluation))
    figures: dict[str, Any] = json.loads(evaluation.read_bytes())
    return figures
