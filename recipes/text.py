"""What makes a run one of text: its configuration, and how it is opened.

    config = { recipe, preset, study, seed, model: {name, ...}, train: {...} }

What a preset sets is in `conf/preset`; `preset_model`, `recipe_preset` and `recipe_preset_model` add what one model,
one recipe, or both need. A `study` is a row of the paper's tables, on top of everything else.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from recipes import conf
from recipes.corpora.catalogue import RECIPES, find_recipe
from waveform.runs.folder import read_config
from waveform.runs.named import find_run
from waveform.runs.opened import TrainedRun, open_run
from waveform.runs.origin import Origin, compose_from
from waveform.runs.settings import ConfigFamily, compose_family
from waveform.runs.sources import annotated
from waveform.runs.space import Space, space_of
from waveform.system.errors import UserError

_TEXT = ConfigFamily(
    module="recipes.conf",
    root="text",
    command="python -m recipes train ... --print-config",
)


def compose_config(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    origin: Origin | None = None,
    run_dir: Path | None = None,
) -> dict[str, Any]:
    """Return the resolved configuration as plain dicts, for a run in `run_dir` with what it takes over from its origin.

    Raises UserError for an unknown recipe, key, choice or type, and for an origin that does not fit.
    """
    for found in (*RECIPES.values(), find_recipe(recipe)):
        node = {"recipe": found.name, "train": {"state": found.state}}
        ConfigStore.instance().store(group="recipe", name=found.name, node=node, package="_global_")

    def compose(overrides: Sequence[str]) -> dict[str, Any]:
        return compose_family(_TEXT, [f"recipe={recipe}", *overrides], config_dir=config_dir)

    config = compose(overrides) if run_dir is None else compose_from(origin, run_dir, overrides, compose=compose)
    if "origin" not in config:
        _require_sizes(config)
    return config


def _require_sizes(config: dict[str, Any]) -> None:
    """Raises UserError if the preset has sizes for some models, or some recipes and models, but not for these."""
    folder = Path(*conf.__path__)
    recipe, preset, model = config["recipe"], config["preset"], config["model"]["name"]
    by_model = sorted(path.stem.removeprefix(f"{preset}_") for path in folder.glob(f"preset_model/{preset}_*.yaml"))
    by_recipe = [path.stem.split(f"_{preset}_") for path in folder.glob(f"recipe_preset_model/*_{preset}_*.yaml")]
    if not (by_model or by_recipe) or model in by_model or [recipe, model] in by_recipe:
        return
    if by_model and not any(folder.glob(f"preset_model/*_{model}.yaml")):
        return  # a model of another package, with sizes of its own
    some = by_model or [f"{recipe} with model={model}" for recipe, model in sorted(by_recipe)]
    raise UserError(f"preset={preset} has no sizes for {recipe} with model={model}; it has some for {', '.join(some)}")


def search_space(model: str, *, file: Path | None = None) -> Space:
    """What `tune` searches of a model on text; arguments and errors as of `space_of`."""
    return space_of(model, packages=[_TEXT.module], file=file)


def load(run_dir: Path | str, *, device: str | None = None, **model_fields: int) -> TrainedRun:
    """Open the newest checkpoint of a run.

    device: cpu, cuda, or None for a GPU if there is one. model_fields: fields that change no parameter, for example a
    longer `memory` or `compressed` than in training. Raises UserError if there is no run on text, or no complete
    checkpoint.
    """
    require_text(run_dir)
    return open_run(run_dir, device=device, **model_fields)


def require_text(run_dir: Path | str, *, remedy: str | None = None) -> dict[str, Any]:
    """What the configuration of a run says of its data set. Raises UserError for a run on audio, or of an agent."""
    dataset: dict[str, Any] = read_config(find_run(run_dir))["dataset"]
    kind = dataset["modality"].get("kind")
    if kind == "environment":
        raise UserError(f"{run_dir} is a run of an agent, not on text; {remedy or 'use evaluate, compare or play'}")
    if kind != "text":
        raise UserError(f"{run_dir} is a run on {kind}, not on text; {remedy or 'use the command waveform'}")
    return dataset


def print_config(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    origin: Origin | None = None,
    run_dir: Path | None = None,
) -> None:
    """Print the resolved configuration as YAML, and behind each setting that has a source which one it is."""
    config = compose_config(recipe, overrides, config_dir=config_dir, origin=origin, run_dir=run_dir)
    print(annotated(config, domain=recipe, overrides=overrides), end="")
