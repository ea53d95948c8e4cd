"""The configuration of a run on text.

    config = { recipe, preset, study, seed, model: {name, ...}, train: {...} }

What a preset sets is in `conf/preset`, with more for one model, one recipe, or both, in `preset_model`,
`recipe_preset` and `recipe_preset_model`; a `study` is one row of the paper's tables, laid over all of it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from recipes.corpora.catalogue import RECIPES, find_recipe
from waveform.runs.settings import ConfigFamily, compose_family

_TEXT = ConfigFamily(
    module="recipes.conf",
    root="text",
    command="python -m recipes train ... --print-config",
    chosen=("preset", "study"),
)


def compose_config(recipe: str, overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> dict[str, Any]:
    """The resolved configuration as plain dicts. Raises UserError for an unknown recipe, key, choice or type."""
    for found in (*RECIPES.values(), find_recipe(recipe)):
        node = {"recipe": found.name, "train": {"state": found.state}}
        ConfigStore.instance().store(group="recipe", name=found.name, node=node, package="_global_")
    return compose_family(_TEXT, [f"recipe={recipe}", *overrides], config_dir=config_dir)
