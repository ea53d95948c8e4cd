"""Which data set a run on speech reads: the one that a user names, or one prepared from a folder of raw audio."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from waveform.audio.audio_format import differences, format_of
from waveform.audio.corpus.labels import FOLDER, NONE, source_of
from waveform.audio.corpus.prepare import DataConfig, prepare, prepared_with, require_folder
from waveform.audio.demo_speech import demo_speech_dir
from waveform.audio.demo_voices import demo_voices_dir
from waveform.engine.dataset import Dataset, is_dataset, read_dataset
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.runs.folder import CONFIG_FILE, read_config
from waveform.runs.hub import is_hub_name
from waveform.runs.named import is_bundled, temporary_folder
from waveform.runs.opened import TrainedRun
from waveform.runs.scoring import own_tokens
from waveform.runs.settings import given_by, leaves, typed
from waveform.system.errors import UserError


def cache_of(source: Path, *, run_dir: Path) -> Path:
    """Where the data set that is prepared from a folder of raw audio is kept, named after the folder and its path.

    It is next to the run, or in the working directory if the run comes with waveform or is on a hub.
    """
    resolved = source.resolve()
    name = f"{resolved.name}-{hashlib.blake2b(os.fsencode(resolved), digest_size=4).hexdigest()}.prepared"
    return (Path.cwd() if is_hub_name(run_dir) else run_dir.absolute().parent) / name


def open_data(source: Path, *, run_dir: Path, config: DataConfig, world: World) -> Dataset:
    """Open the data set at `source`; raw audio is first prepared into a folder next to the run, whose path is printed.

    Its labels are those that `config` asks for; if it does not say, a data set has its own, and raw audio has none.
    Raises UserError as `prepare` does.
    """
    if is_dataset(source):
        return as_asked(read_dataset(source), config, prepared=True)
    cache = cache_of(source, run_dir=run_dir)
    with world.first_alone():
        if world.is_first:
            world.say(f"preparing {source} into {cache} (once; later runs reuse it)")
            # A run that reads no labels leaves those that the data set already has to other runs.
            prepared_as = replace(config, labels=None) if config.labels == NONE else config
            prepare(source, cache, config=prepared_as, show_progress=world.shows)
    return as_asked(read_dataset(cache), config, prepared=False)


def as_asked(data: Dataset, config: DataConfig, *, prepared: bool) -> Dataset:
    """A data set with the labels that a run with these settings reads, as `open_data` returns it.

    prepared: the user named the data set itself, and not the audio that it was prepared from.
    """
    reads_labels = prepared if config.labels is None else config.labels != NONE
    return data if reads_labels else replace(data, labels={})


def data_of_training(source: Path, run_dir: Path, config: dict[str, Any], *, world: World) -> Dataset:
    """Open the data set at `source`, which is prepared first if it is raw audio.

    If the run in `run_dir` began with it, it is left as it is: files added since would change what the run learns from.
    Raises UserError as `open_data` does, for data that is not audio, and if the run began with data of another format.
    """
    data_config: DataConfig = typed(DataConfig, config["data"], section="data")
    cache = cache_of(source, run_dir=run_dir).resolve()
    resumes = not is_dataset(source) and (run_dir / CONFIG_FILE).exists()
    if resumes and Path(read_config(run_dir)["dataset"]["path"]) == cache and is_dataset(cache):
        data = read_dataset(cache)
        if different := differences(format_of(data.modality).settings, data_config.audio_format.settings):
            raise UserError(f"the run in {run_dir} began with other data: {different}; give another RUN_DIR")
        data = as_asked(data, data_config, prepared=False)
        world.say(f"resuming with {data.folder}, as prepared when this run began")
    else:
        data = open_data(source, run_dir=run_dir, config=data_config, world=world)
    require_audio(data.modality, data.folder)
    return data


def refuse_other_data(data_dir: Path, config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Raises UserError if `overrides` contain a setting of the data with which the data set was not prepared."""
    data = read_dataset(data_dir)
    before = prepared_with(data)
    if not before:  # not audio
        return
    given = {name: value for name, value in leaves({"data": config["data"]}) if name in given_by(overrides)}
    given.pop("data.num_workers", None)
    if "data.labels" in given:  # a run need not read them
        labels, labelled = source_of(given["data.labels"]), data.sources.get("labels")
        before["data.labels"], given["data.labels"] = labelled, labelled if labels in (None, NONE) else labels
    # "not used": a share, for example, if folders divided the files.
    if different := differences({name: before.get(name, "not used") for name in given}, given):
        raise UserError(
            f"{data_dir} was prepared differently: {different}; leave the setting out, or prepare the audio into "
            "another folder"
        )


def require_audio(modality: dict[str, Any], place: Path | str) -> None:
    """Raises UserError for a data set, or a run on one, of another kind, for example text."""
    kind = modality.get("kind")
    if kind != "audio":
        what = "is a run of an agent, not on audio" if kind == "environment" else f"contains {kind}, not audio"
        raise UserError(f"{place} {what}")


@cache
def _prepared(recordings: Path, labels: str) -> Path:
    """The data set of bundled recordings, which stays until this process ends."""
    folder = temporary_folder()
    prepare(recordings, folder, config=DataConfig(labels=labels), show_progress=False)
    return folder


def open_split(run: TrainedRun, *, data: Path | str | None, split: str, show_progress: bool) -> TokenSet:
    """The tokens of a split of the run's own data set, or of another (prepared first if it is raw audio).

    A bundled run comes without its data, so it gets those of the bundled speech, or of the bundled voices if it knows
    labels; it has not learned from their validation and test recordings. Raises UserError for a damaged shard, which it
    names, and if the data is gone or of another kind.
    """
    world = World(show_progress=show_progress)
    if data is None:
        if not is_bundled(run.given):
            return own_tokens(run, split=split)
        data = _prepared(demo_voices_dir(), FOLDER) if run.labels else _prepared(demo_speech_dir(), NONE)
        world.say(f"{run.given}: on the {split} recordings of the bundled {'voices' if run.labels else 'speech'}")
    data = Path(data)
    require_folder(data)
    audio_format = format_of(run.config["dataset"]["modality"])
    config: DataConfig = typed(DataConfig, run.config["data"], section="data")
    # A data set has its own labels, and raw audio none; the number of processes depends on the machine, not on a run.
    config = replace(config, **vars(audio_format), labels=None, num_workers=None)
    dataset = open_data(data, run_dir=run.given, config=config, world=world)
    require_audio(dataset.modality, data)
    if different := differences(audio_format.settings, format_of(dataset.modality).settings):
        raise UserError(
            f"--data {data} has different tokens from those that {run.given} was trained on: {different}; give its "
            "recordings instead, or prepare them with the settings that the run was trained on"
        )
    return dataset.open_split(split)
