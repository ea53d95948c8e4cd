"""`waveform prepare`: makes a data set of tokens from a folder of audio, or brings it up to date."""

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from pathlib import Path

from waveform.audio.corpus.catalogue import find_corpus
from waveform.audio.corpus.cluster import cluster
from waveform.audio.corpus.prepare import DataConfig
from waveform.audio.corpus.prepare import prepare as prepare_folder
from waveform.engine.dataset import Dataset
from waveform.runs.settings import given_by, setting_of, typed
from waveform.speech.config import compose_config
from waveform.system.errors import UserError


def prepare(
    audio_dir: Path | str,
    data_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    corpus: str | None = None,
    partial: bool = False,
    executor: Executor | str | None = None,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> Dataset:
    """Prepare the audio under `audio_dir` into `data_dir`: new files are added, and those that are gone are dropped.

    overrides: `data.NAME=value` settings. corpus: the name of the published corpus in `audio_dir`, which sets some of
    them. partial: accept a part of it. executor: does the work on files instead of processes of this machine: a Dask
    cluster's dask://HOST:PORT, or any Executor. Its processes must see both folders under the same paths.
    Raises UserError for bad settings and as `audio.corpus.prepare` does.
    """
    published = None if corpus is None else find_corpus(corpus)
    if partial and published is None:
        raise UserError("--partial is for a part of a published corpus; name it with --corpus")
    for override in overrides:
        if setting_of(override).partition(".")[0] in ("model", "train", "seed"):
            raise UserError(f"{override} is for training; prepare reads the settings of data: leave it out")
    if published is not None:
        for override in overrides:
            of_split = [name for name in given_by([override]) if name.startswith("data.split.")]
            if "data.split.by" in of_split or (of_split and published.split != "hash"):
                raise UserError(f"{override}: {published.title} is divided as published; leave it out")
        overrides = [*published.settings, *overrides]
    config = typed(DataConfig, compose_config(overrides, config_dir=config_dir)["data"], section="data")
    with cluster(executor) if isinstance(executor, str) else nullcontext(executor) as opened:
        return prepare_folder(
            Path(audio_dir),
            Path(data_dir),
            config=config,
            corpus=published,
            partial=partial,
            executor=opened,
            show_progress=show_progress,
        )
