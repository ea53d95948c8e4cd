"""`python -m recipes tune`: searches the settings that reach the best validation NLL on a corpus in a given time."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipes.text import compose_config, load, search_space
from recipes.verbs.train import amount_of, open_prepared
from waveform.engine.train_config import TrainConfig
from waveform.runs.search import SearchConfig, Task, search
from waveform.runs.search_report import report_search
from waveform.system.output import write_json

_PRESET = "preset=cpu"  # small models, for which the search spaces are


def tune(
    recipe: str,
    data_dir: Path | str,
    out_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    config: SearchConfig | None = None,
    config_dir: Path | None = None,
    json_file: Path | str | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Search the settings of one model on the data set in `data_dir`, prepared by `recipe`, in `out_dir`.

    As `waveform.tune` in everything else: the trials, what is returned and written, and the errors.
    """
    data, out_dir = open_prepared(data_dir, recipe), Path(out_dir)
    config = config or SearchConfig()
    if not any(override.startswith("preset=") for override in overrides):
        overrides = [_PRESET, *overrides]
    task = Task(
        compose=partial(compose_config, recipe, config_dir=config_dir),
        train_config=TrainConfig,
        space=partial(search_space, file=config.space),
        open_data=lambda world: data,
        dataset=vars(data),
        load=load,
        unit="token",
        amount_of=amount_of,
    )
    found = search(out_dir, overrides, task, config, show_progress=show_progress)
    write_json(json_file, found.entries)
    command = f"python -m recipes train {recipe}"
    report_search(found, out_dir, task, command=command, config_dir=config_dir, show_progress=show_progress)
    return found.entries
