"""`waveform tune`: searches the settings that reach the best validation NLL on one's own audio in a given time."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from waveform.audio.audio_format import AudioFormat
from waveform.audio.corpus.prepare import DataConfig
from waveform.engine.dataset import Dataset, is_dataset, read_dataset
from waveform.ranks.distributed import World
from waveform.runs.search import STUDY_FILE, SearchConfig, Task, search
from waveform.runs.search_report import report_search
from waveform.runs.settings import typed
from waveform.speech import (
    SpeechTrainConfig,
    as_asked,
    cache_of,
    compose_config,
    load,
    open_data,
    require_audio,
    search_space,
)
from waveform.system.atomic import require_writable
from waveform.system.output import write_json
from waveform.verbs.train import amount_of, refuse_other_data, require_source

_PRESET = "preset=demo"  # its schedule is one of time, for small models


def tune(
    source: Path | str,
    out_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    config: SearchConfig | None = None,
    config_dir: Path | str | None = None,
    json_file: Path | str | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Search the settings of one model on `source` (a folder of audio, or a prepared data set), in `out_dir`.

    Every trial is a run `out_dir`/trial-NNN with the same budget; its figure is the NLL of the validation split, of
    about 2 million samples of it if it has more. Prints the best, and returns (and writes) an entry for each trial,
    the best first; the best trial's settings become `out_dir`/preset/best.yaml. Called again, it continues.

    overrides: `key=value` settings of every trial, which are not searched. Raises UserError for bad settings or data,
    for a folder with anything else, and if Optuna is not installed.
    """
    source, out_dir = Path(source), Path(out_dir)
    config = config or SearchConfig()
    require_writable(json_file, option="--json")
    compose = partial(compose_config, config_dir=None if config_dir is None else Path(config_dir))
    if not any(override.startswith("preset=") for override in overrides):
        overrides = [_PRESET, *overrides]
    require_source(source)

    def data(world: World) -> Dataset:
        if is_dataset(source):
            refuse_other_data(source, compose(overrides), overrides)
        data = _data_of(source, out_dir, compose(overrides), world=world, show_progress=show_progress)
        require_audio(data.modality, data.folder)
        return data

    task = Task(
        compose=compose,
        train_config=SpeechTrainConfig,
        space=partial(search_space, file=config.space),
        open_data=data,
        dataset={"vocab_size": AudioFormat().num_classes, "modality": AudioFormat().modality()},
        load=load,
        unit="sample",
        amount_of=amount_of,
    )
    found = search(out_dir, overrides, task, config, show_progress=show_progress)
    write_json(json_file, found.entries)
    report_search(found, out_dir, task, command="waveform train", config_dir=config_dir, show_progress=show_progress)
    return found.entries


def _data_of(source: Path, out_dir: Path, config: dict[str, Any], *, world: World, show_progress: bool) -> Dataset:
    """The data set of a search, prepared once: files added since would make later trials learn from other data."""
    data_config: DataConfig = typed(DataConfig, config["data"], section="data")
    first_run = out_dir / "trial-000"
    cache = cache_of(source, run_dir=first_run)
    if (out_dir / STUDY_FILE).exists() and not is_dataset(source) and is_dataset(cache):
        return as_asked(read_dataset(cache), data_config, prepared=False)
    return open_data(source, run_dir=first_run, config=data_config, world=world, show_progress=show_progress)
