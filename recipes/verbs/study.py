"""`python -m recipes study`: every setting of a study, trained with several seeds, evaluated and drawn."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.reinforcement import AGENTS_STUDY
from recipes.studies.catalogue import Study, find_study
from recipes.studies.children import Children, Run, StudyConfig
from recipes.studies.report import Config, Figures
from recipes.text import compose_config
from waveform.engine import checkpoint
from waveform.engine.dataset import Dataset, read_dataset
from waveform.runs.folder import CONFIG_FILE
from waveform.runs.settings import given_by, leaves, setting_of
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.output import check_files, write_json


def study(
    name: str,
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    config: StudyConfig | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
) -> dict[str, Any]:
    """Train and evaluate each setting of a study with several seeds, at the size of a preset.

    paths: DATA_DIR and OUT_DIR; OUT_DIR alone for agents, which have no data. Each run is a folder of OUT_DIR and a
    process of its own, with its share of the CPU's threads. Run again, the study continues: what was trained or
    evaluated is not done twice. overrides: settings of every run, a preset for example; those of the study come after
    them; `seed` is the first of the seeds. Prints a table and returns the figures; writes them into `json_file` and
    draws them into `plot_file`, by default NAME.json and NAME.png of OUT_DIR. Raises UserError for an unknown study,
    for data of the wrong recipe, for settings that a run refuses or that the study sets itself, and if a run fails.
    """
    config, out_dir, has_data = config or StudyConfig(), Path(paths[-1]), name != AGENTS_STUDY
    chosen = find_study(name) if has_data else None
    for option in ("agents", "envs") if has_data else ("rows", "config_dir"):
        if getattr(config, option):
            raise UserError(f"study {name} has no option --{option.replace('_', '-')}; leave it out")
    if len(paths) != 1 + has_data:
        needs = "needs two paths, DATA_DIR and OUT_DIR" if has_data else "has no data: give OUT_DIR alone"
        raise UserError(f"study {name} {needs}, and then settings")
    if (out_dir / CONFIG_FILE).exists():
        raise UserError(f"{out_dir} is a run; give a folder for the study, which keeps its runs there")
    json_file, plot_file = json_file or out_dir / f"{name}.json", plot_file or out_dir / f"{name}.png"
    check_files(json_file=json_file, plot_file=plot_file)
    compose: Callable[..., dict[str, Any]]
    if chosen is not None:
        data, compose, given = read_dataset(Path(paths[0])), compose_config, overrides
        source, recipe, about = paths[0], _recipe(data, chosen, name=name), {"data": data.open_split("test").checksum}
    else:
        from recipes.reinforcement import figure5, settings  # only this study needs them

        chosen, compose, given = figure5.study_of_agents(overrides, config), settings.compose_config, ()
        source, recipe, about = str(chosen.recipe), str(chosen.recipe), {}
    preset = compose(recipe, overrides, config_dir=config.config_dir)
    own = {label: chosen.settings(label, preset) for label in chosen.variants}
    # Composed at once, so that a wrong setting is refused before anything is trained.
    configs = {k: compose(recipe, [*given, *each], config_dir=config.config_dir) for k, each in own.items()}
    changes = [(preset, each) for each in configs.values()]
    bare = [override for override in given if "." not in setting_of(override)]
    if bare != list(given):  # the others override settings of conf/studies.yaml
        for each in own.values():
            model = [setting for setting in each if setting_of(setting) == "model"]  # whose preset may differ
            before, after = (compose(recipe, [*bare, *more], config_dir=config.config_dir) for more in (model, each))
            changes.append((before, after))
    _refuse_what_it_sets(name, chosen, overrides, changes)
    commands = {label: chosen.report.commands(each) for label, each in configs.items()}
    seeds = [preset["seed"] + i for i in range(config.seeds or chosen.seeds)]
    children = Children(config.jobs)
    options = ["--config-dir", str(config.config_dir)] if config.config_dir is not None else []

    def finish(run: Run) -> Figures:
        label, seed = run
        folder = out_dir / f"{label}-{seed}"
        children.call("train", source, str(folder), *given, *own[label], f"seed={seed}", *options)
        files = _scored(commands[label], folder, configs[label], rows=config.rows, children=children)
        say(f"{folder}: trained and scored")
        return chosen.report.read(folder, files)

    every = children.finish_all([(label, seed) for seed in seeds for label in own], finish)
    runs = {label: [every[label, seed] for seed in seeds] for label in own}
    figures = chosen.report.summarise(runs)
    summary = {
        "study": name,
        "title": chosen.title,
        "recipe": recipe,
        "preset": preset["preset"],
        "seeds": len(seeds),
        "rows": config.rows,
        "threads_per_run": children.threads,
        "settings": own,
        "overrides": list(overrides),
        **about,
        **chosen.report.beside(runs),
        "figures": figures,
    }
    print(f"{chosen.title}\n{chosen.report.table(figures)}")
    write_json(json_file, summary)
    chosen.report.draw(plot_file, figures, runs)
    return summary


def _recipe(data: Dataset, chosen: Study, *, name: str) -> str:
    """The recipe that data was prepared by. Raises UserError if the study needs another."""
    recipe = data.modality.get("recipe")
    if not isinstance(recipe, str):
        raise UserError(f"{data.folder} is not text; prepare a data set with `python -m recipes prepare`")
    if chosen.recipe not in (None, recipe):
        raise UserError(f"study {name} needs data prepared as {chosen.recipe}; {data.folder} was prepared as {recipe}")
    return recipe


def _refuse_what_it_sets(
    name: str, chosen: Study, overrides: Sequence[str], changes: Sequence[tuple[Config, Config]]
) -> None:
    """Raises UserError for a user's setting that the study changes; changes: configurations before and after it."""
    values = [(dict(leaves(before)), dict(leaves(after))) for before, after in changes]
    for key in given_by(overrides):
        leaf = "model.name" if key == "model" else key
        if key not in chosen.heeds and any(before.get(leaf) != after.get(leaf) for before, after in values):
            raise UserError(f"study {name} sets {key} itself; leave it out")


def _scored(
    commands: Mapping[str, Sequence[str]], folder: Path, config: Config, *, rows: int | None, children: Children
) -> Mapping[str, Any]:
    """Read the scores of a trained run from its folder; those that are missing are computed first.

    A file's name contains the step and a digest of the command, so that scores of another are not taken for these.
    """
    found = checkpoint.newest(folder)
    assert found is not None
    where = ["--device", device] if (device := config["train"]["device"]) else []
    scores = {}
    for name, (verb, *options) in commands.items():
        options += [] if rows is None else ["--rows", str(rows)]
        path = folder / f"{verb}-{found.step}-{hashlib.sha256(' '.join(options).encode()).hexdigest()[:8]}.json"
        if not path.exists():
            children.call(verb, str(folder), *options, "--json", str(path), *where)
        try:
            scores[name] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); remove it, and the run is scored again") from error
    return scores
