"""`python -m recipes study`: every setting of a study, trained with several seeds, evaluated and drawn."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.reinforcement.recipes import AGENTS_STUDY
from recipes.studies.catalogue import Study, find_study
from recipes.studies.children import Children, StudyConfig
from recipes.studies.report import Config, Figures
from recipes.text import compose_config
from waveform.engine import checkpoint
from waveform.engine.dataset import Dataset, read_dataset
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json


def study_paths(
    name: str,
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    config: StudyConfig | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
) -> dict[str, Any]:
    """`study` with the paths of a command line: DATA_DIR and OUT_DIR, or OUT_DIR alone for agents."""
    config = config or StudyConfig()
    if name == AGENTS_STUDY:
        if len(paths) != 1:
            raise UserError(f"study {name} has no data: give OUT_DIR alone, and then settings")
        if config.rows is not None or config.config_dir is not None:
            raise UserError(f"study {name} does not know --rows or --config-dir; leave them out")
        from recipes.reinforcement.figure5 import figure5  # here: others do without it

        return figure5(Path(paths[0]), overrides, config=config, json_file=json_file, plot_file=plot_file)
    find_study(name)
    if config.agents or config.envs:
        raise UserError(f"study {name} does not know --agents or --envs; leave them out")
    if len(paths) != 2:
        raise UserError(f"study {name} needs two paths, DATA_DIR and OUT_DIR, and then settings")
    return study(
        name, Path(paths[0]), Path(paths[1]), overrides, config=config, json_file=json_file, plot_file=plot_file
    )


def study(
    name: str,
    data_dir: Path,
    out_dir: Path,
    overrides: Sequence[str] = (),
    *,
    config: StudyConfig | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Train and evaluate each setting of a study with several seeds, at the size of a preset.

    Each run is a folder of `out_dir` and a process of its own, with its share of the CPU's threads. Run again, the
    study continues: what was trained or evaluated is not done twice. overrides: settings of every run, a preset for
    example; those of the study come after them. Prints a table and returns the figures; writes them into `json_file`
    and draws them into `plot_file`, by default NAME.json and NAME.png of `out_dir`. Raises UserError for an unknown
    study, for data of the wrong recipe, for settings that a run refuses, and if a run fails.
    """
    config, chosen = config or StudyConfig(), find_study(name)
    json_file, plot_file = json_file or out_dir / f"{name}.json", plot_file or out_dir / f"{name}.png"
    check_files(json_file=json_file, plot_file=plot_file)
    recipe = _recipe(read_dataset(data_dir), chosen, name=name)
    preset = compose_config(recipe, overrides, config_dir=config.config_dir)
    settings = {label: [*overrides, *chosen.settings(label, preset)] for label in chosen.variants}
    # Composed at once, so that a wrong setting is refused before anything is trained.
    configs = {label: compose_config(recipe, given, config_dir=config.config_dir) for label, given in settings.items()}
    num_seeds = config.seeds or chosen.seeds
    runs = [(label, seed) for seed in range(num_seeds) for label in chosen.variants]
    children = Children(config.jobs)
    options = ["--config-dir", str(config.config_dir)] if config.config_dir is not None else []

    def finish(run: tuple[str, int]) -> Figures:
        label, seed = run
        folder = out_dir / f"{label}-{seed}"
        children.call("train", str(data_dir), str(folder), *settings[label], f"seed={seed}", *options)
        files = _scored(chosen, folder, configs[label], rows=config.rows, children=children)
        if show_progress:
            say(f"{folder}: trained and scored")
        return chosen.report.read(folder, files)

    every = children.finish_all(runs, finish)
    by_label = {label: [every[label, seed] for seed in range(num_seeds)] for label in chosen.variants}
    figures = chosen.report.summarise(by_label)
    summary = {
        "study": name,
        "title": chosen.title,
        "recipe": recipe,
        "preset": preset["preset"],
        "seeds": num_seeds,
        "rows": config.rows,
        "threads_per_run": children.threads,
        "settings": {label: list(given[len(overrides) :]) for label, given in settings.items()},
        "overrides": list(overrides),
        "data": read_dataset(data_dir).open_split("test").checksum,
        "figures": figures,
    }
    if show_progress:
        print(f"{chosen.title}\n{chosen.report.table(figures)}")
    write_json(json_file, summary)
    chosen.report.draw(plot_file, figures, by_label)
    return summary


def _recipe(data: Dataset, chosen: Study, *, name: str) -> str:
    """The recipe that data was prepared by. Raises UserError if the study needs another."""
    recipe = data.modality.get("recipe")
    if not isinstance(recipe, str):
        raise UserError(f"{data.folder} is not text; prepare a data set with `python -m recipes prepare`")
    if chosen.recipe not in (None, recipe):
        raise UserError(f"study {name} needs data prepared as {chosen.recipe}; {data.folder} was prepared as {recipe}")
    return recipe


def _scored(chosen: Study, folder: Path, config: Config, *, rows: int | None, children: Children) -> Mapping[str, Any]:
    """What the study needs to know of a trained run, scored now unless the run's folder has it of this step."""
    cut = [] if rows is None else ["--rows", str(rows)]
    where = ["--device", device] if (device := config["train"]["device"]) else []
    found = checkpoint.newest(folder)
    assert found is not None
    files = {}
    for name, (verb, *options) in chosen.report.commands(config).items():
        path = folder / name
        if not path.exists() or _scored_as(path) != (found.step, rows):
            children.call(verb, str(folder), *options, *cut, "--json", str(path), *where)
        files[name] = json.loads(path.read_bytes())
    return files


def _scored_as(path: Path) -> tuple[Any, Any]:
    """The step and the rows of what `evaluate` or `sweep` wrote; of a damaged file, neither."""
    try:
        content = json.loads(path.read_bytes())
        first = content["sizes"][0] if "sizes" in content else content
        return first["step"], first["rows"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None, None
