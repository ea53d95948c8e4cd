"""`waveform train`: composes a configuration, opens the audio's data set and trains into a run folder."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from waveform.audio.audio_format import differences, format_of
from waveform.audio.corpus.labels import NONE
from waveform.audio.corpus.prepare import DataConfig
from waveform.engine.dataset import Dataset, is_dataset, read_dataset
from waveform.engine.interface import SequenceModel
from waveform.engine.metrics import MetricsLog
from waveform.engine.sampler import SamplingConfig
from waveform.engine.sampler import sample as sample_tokens
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import OnEvaluate, RunContext, TrainResult
from waveform.ranks.distributed import World, job
from waveform.runs.folder import CONFIG_FILE, check_run_dir, read_config
from waveform.runs.origin import Origin
from waveform.runs.settings import typed
from waveform.runs.training import check_settings, report_training, train_run, train_runs
from waveform.speech import SpeechTrainConfig, as_asked, cache_of, compose_config, open_data, require_audio
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.signals import StopRequest


def train(
    source: Path | str,
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    origin: Origin | None = None,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train on `source` (a folder of audio, or a prepared data set) into `run_dir`; resumes what is there.

    overrides: `key=value` settings. origin: a run whose weights and settings this one begins with. Under torchrun every
    process calls this. Raises UserError for bad settings or data, for a run folder with a different configuration, for
    an origin that does not fit, and if the loss stops being finite.
    """
    source, run_dir = Path(source), Path(run_dir)
    config = compose_config(
        overrides, config_dir=None if config_dir is None else Path(config_dir), origin=origin, run_dir=run_dir
    )
    train_config: SpeechTrainConfig = typed(SpeechTrainConfig, config["train"], section="train")
    if is_dataset(source):
        refuse_other_data(source, config, overrides)
    with job(device=train_config.device, timeout_s=train_config.timeout_s) as world:
        check_run(source, run_dir, config, train_config, world=world)
        data = data_of_training(source, run_dir, config, world=world, show_progress=show_progress)
        context = audio_context(run_dir, data, train_config, world=world, show_progress=show_progress)
        return train_run(data, config, train_config, context, amount=amount_of(data))


def train_all(
    source: Path | str,
    runs: Mapping[Path, Sequence[str]],
    *,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> list[TrainResult]:
    """Train several runs on `source` in turn, in slices of seconds; resumes what is there. Returns how each ended.

    runs: `key=value` settings of each run folder. Raises UserError as `train` does, before anything is prepared if it
    is for a setting. Otherwise as `train_runs` of waveform/runs/training.
    """
    source, config_dir = Path(source), None if config_dir is None else Path(config_dir)
    configs = {run_dir: compose_config(overrides, config_dir=config_dir) for run_dir, overrides in runs.items()}
    settings: dict[Path, SpeechTrainConfig] = {
        run_dir: typed(SpeechTrainConfig, config["train"], section="train") for run_dir, config in configs.items()
    }
    if is_dataset(source):
        for run_dir, config in configs.items():
            refuse_other_data(source, config, runs[run_dir])
    first_dir, first = next(iter(settings.items()))
    with job(device=first.device, timeout_s=first.timeout_s) as world:
        for run_dir, config in configs.items():
            check_run(source, run_dir, config, settings[run_dir], world=world)
        data = data_of_training(source, first_dir, configs[first_dir], world=world, show_progress=show_progress)
        opened = [
            (
                config,
                settings[run_dir],
                audio_context(run_dir, data, settings[run_dir], world=world, show_progress=show_progress),
            )
            for run_dir, config in configs.items()
        ]
        return train_runs(data, opened, amount=amount_of(data))


def check_run(
    source: Path, run_dir: Path, config: dict[str, Any], train_config: SpeechTrainConfig, *, world: World
) -> None:
    """Refuse, before anything is prepared or written, a run that cannot begin or continue. Raises UserError."""
    require_source(source)
    check_run_dir(run_dir)
    data_config: DataConfig = typed(DataConfig, config["data"], section="data")
    audio_format = data_config.audio_format
    dataset = {"vocab_size": audio_format.num_classes, "modality": audio_format.modality()}
    check_settings(run_dir, config, train_config, dataset=dataset, world=world)


def require_source(source: Path) -> None:
    """Raises UserError if there is no `source`."""
    if not source.exists():
        raise UserError(f"no such folder: {source}; give a folder of audio or a prepared data set")


def data_of_training(
    source: Path, run_dir: Path, config: dict[str, Any], *, world: World, show_progress: bool
) -> Dataset:
    """The data set at `source`, prepared first if it is raw audio, unless the run in `run_dir` began with it."""
    data_config: DataConfig = typed(DataConfig, config["data"], section="data")
    data = _data_of_run(source, run_dir)
    if data is None:
        data = open_data(source, run_dir=run_dir, config=data_config, world=world, show_progress=show_progress)
    else:
        if different := differences(format_of(data.modality), data_config.audio_format):
            raise UserError(f"the run in {run_dir} began with other data: {different}; give another RUN_DIR")
        data = as_asked(data, data_config, prepared=False)
        if show_progress and world.is_first:
            say(f"resuming with {data.folder}, as prepared when this run began")
    require_audio(data.modality, data.folder)
    return data


def audio_context(
    run_dir: Path, data: Dataset, train_config: SpeechTrainConfig, *, world: World, show_progress: bool
) -> RunContext:
    """Where a training on audio runs and how it reports."""
    return RunContext(
        run_dir,
        world,
        units_per_second=data.modality.get("sample_rate_hz"),
        on_evaluate=_audio_summary(train_config, data),
        show_progress=show_progress,
    )


def amount_of(data: Dataset) -> Callable[[TokenSet], str]:
    """What says how much audio a split of `data` is."""
    rate = data.modality["sample_rate_hz"]
    return lambda tokens: f"{tokens.num_tokens / rate / 60:.1f} minutes of audio"


def refuse_other_data(data_dir: Path, config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Raises UserError for a setting of the data among `overrides` with which the data set was not prepared."""
    data = read_dataset(data_dir)
    split = data.sources.get("split")
    if not isinstance(split, dict):  # not audio
        return
    given = {override.lstrip("+").partition("=")[0].removeprefix("data.") for override in overrides}
    before = format_of(data.modality)
    now = replace(before, **{name: config["data"][name] for name in vars(before) if name in given})
    if different := differences(before, now):
        raise UserError(f"{data_dir} was prepared differently: {different}; leave the setting out, or prepare it anew")
    labels, labelled = config["data"]["labels"], data.sources.get("labels")
    if "labels" in given and labels not in (None, NONE, labelled) and os.path.abspath(labels) != labelled:
        how = f"with data.labels={labelled}" if labelled else "without labels"
        raise UserError(
            f"data.labels={labels}, but {data_dir} was prepared {how}; leave the setting out, or prepare it with that"
        )
    for key in (override.lstrip("+").partition("=")[0] for override in overrides):
        name = key.removeprefix("data.split.")
        if name != key and config["data"]["split"][name] != (was := split.get(f"split.{name}")):
            by = f"as the corpus {split['corpus']} is" if "corpus" in split else f"by its folders {split.get('layout')}"
            how = f"with {key}={was}" if was is not None else by
            raise UserError(
                f"{key}={config['data']['split'][name]}, but {data_dir} was split {how} when it was prepared; leave "
                "the setting out, or prepare the audio into another folder"
            )


def _data_of_run(source: Path, run_dir: Path) -> Dataset | None:
    """The data set that the run in `run_dir` began with, if it was prepared from the raw audio in `source`.

    It is not brought up to date: files added since would change what the run is trained on.
    """
    if not (run_dir / CONFIG_FILE).exists() or is_dataset(source):
        return None
    folder = Path(read_config(run_dir)["dataset"]["path"])
    return (
        read_dataset(folder) if folder == cache_of(source, run_dir=run_dir).resolve() and is_dataset(folder) else None
    )


def _audio_summary(config: SpeechTrainConfig, data: Dataset) -> OnEvaluate | None:
    """A hook that adds a generated sample, as audio and as an image, to TensorBoard at each evaluation."""
    audio_format = format_of(data.modality)
    num_steps = int(config.sample_seconds * audio_format.sample_rate_hz)
    if num_steps == 0:
        return None

    def summarise(model: SequenceModel, step: int, log: MetricsLog, stop: StopRequest) -> None:
        from waveform.audio.plots import mel_image

        blocks: list[Tensor] = []

        def keep(block: Tensor) -> None:
            blocks.append(block[0])
            stop.check()

        sample_tokens(
            model,
            vocab_size=data.vocab_size,
            num_streams=1,
            num_steps=num_steps,
            config=SamplingConfig(),
            on_block=keep,
        )
        samples = audio_format.decode(torch.cat(blocks).to(torch.uint8))
        rate = audio_format.sample_rate_hz
        log.tensorboard.add_audio("sample", samples, step, sample_rate_hz=rate)
        log.tensorboard.add_image("sample/mel", mel_image(samples.numpy(), sample_rate_hz=rate), step)

    return summarise


def report(result: TrainResult) -> int:
    """Say how training ended; returns the exit code of the command."""
    return report_training(result, unit="samples")
