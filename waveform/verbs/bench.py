"""`waveform bench`: measures models and the preparation of data, prints and writes the figures.

Within a process, a speed and its limit are measured in turn; two processes are measured one after the other.
"""

import datetime
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from waveform.audio.corpus.prepare import DataConfig
from waveform.benchmarks.child import Job, run_in_child
from waveform.benchmarks.flops import BACKWARD_FACTOR
from waveform.benchmarks.model import VOCAB_SIZE, measure_model
from waveform.benchmarks.preparation import measure_preparation
from waveform.benchmarks.report import format_figures
from waveform.models.registry import model_class, model_names
from waveform.ranks.distributed import choose_device
from waveform.runs.configured_model import window_of
from waveform.runs.settings import given_by, setting_of, typed
from waveform.speech.config import SpeechTrainConfig, compose_config
from waveform.system.atomic import require_writable
from waveform.system.console import counted
from waveform.system.errors import UserError
from waveform.system.machine import describe_machine
from waveform.system.output import write_json
from waveform.system.progress import Progress

PRESETS = ("small", "speech_paper")
_BATCH_SIZE = {"cpu": 1, "cuda": 32}
_OPTIONS = {"model": "--models", "preset": "--presets", "train.device": "--device"}  # not settings of a measurement
# State must not reset while updates are timed, and their tokens are counted as one chunk of each row.
_FIXED = {"train.state": "utterance", "train.update_period": 1}


def bench(
    *,
    models: Sequence[str] | None = None,
    presets: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    audio_minutes: float = 10,
    json_file: Path | str | None = None,
    device: str | None = None,
    config_dir: Path | str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Measure `models` at `presets` on synthetic tokens, and data preparation; print tables, return all figures.

    models: None for every registered one. overrides: `key=value` settings for each of them. audio_minutes: of FLAC to
    prepare, 0 for none. An update has 1 row on a CPU and 32 on CUDA unless train.batch_size is set; a CPU updates once
    per window, CUDA once per chunk of the preset. Raises UserError, before any work, for bad settings and a `json_file`
    that cannot be written, and, after everything has been printed and written, if a measurement failed.
    """
    chosen = choose_device(device)
    if chosen == "mps":
        raise UserError("bench measures on cpu and cuda, not on Apple's GPUs")
    require_writable(json_file, option="--json")
    if not 0 <= audio_minutes < math.inf:
        raise UserError(f"--audio-minutes {audio_minutes}: give 0 or more")
    for override in overrides:
        if option := _OPTIONS.get(setting_of(override)):
            raise UserError(f"{override}: bench has an option for it; write {option} {override.partition('=')[2]}")
        if (name := setting_of(override)) in _FIXED:
            raise UserError(f"{override}: bench measures with {name}={_FIXED[name]}; leave it out")
    model_jobs = [
        _model_job(model, preset, chosen, overrides, config_dir)
        for preset in presets or PRESETS
        for model in models or model_names()
    ]
    data_config: DataConfig = typed(DataConfig, model_jobs[0].arguments["config"]["data"], section="data")
    audio_format = asdict(data_config.audio_format)
    preparation_jobs = [
        Job(
            f"preparation with {counted(num_channels, 'channel')}",
            {"kind": "preparation", "minutes": audio_minutes, "channels": num_channels},
            measure_preparation,
            {"minutes": audio_minutes, "num_channels": num_channels, "audio_format": audio_format},
        )
        for num_channels in (1, 2) if audio_minutes
    ]  # fmt: skip
    options = {"--device": chosen, "--models": models, "--presets": presets,
               "--audio-minutes": audio_minutes, "--json": json_file, "--config-dir": config_dir}  # fmt: skip
    content: dict[str, Any] = {
        "command": _command_line(options, overrides),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(torch.device(chosen)),
        "model_flops": f"{BACKWARD_FACTOR} x the matrix products of a forward, and once those of auxiliary losses",
        "models": [],
        "preparation": [],
    }
    errors, jobs = [], [*model_jobs, *preparation_jobs]
    with Progress("bench", total=len(jobs), unit="measurement", enabled=show_progress) as progress:
        for job in jobs:
            figures = run_in_child(job)
            content["models" if job in model_jobs else "preparation"].append(figures)
            if "error" in figures:
                errors.append(figures["error"])
                progress.write(f"failed: {job.title}: {figures['error']}")
            progress.update()
    if show_progress:
        print(format_figures(content))
    write_json(json_file, content)
    if errors:
        raise UserError(f"{len(errors)} of {len(jobs)} measurements failed, the first with: {errors[0]}")
    return content


def _command_line(options: dict[str, Any], overrides: Sequence[str]) -> str:
    words = ["waveform", "bench", *overrides]
    for option, value in options.items():
        if value is not None:
            words += [option, *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return shlex.join(words)


def _model_job(model: str, preset: str, device: str, overrides: Sequence[str], config_dir: Path | str | None) -> Job:
    """The measurement of one model. Raises UserError for settings that its process would refuse."""
    cls = model_class(model)
    asked = [f"preset={preset}", f"model={model}", f"train.batch_size={_BATCH_SIZE[device]}", *overrides]
    config = compose_config(asked, config_dir=config_dir)
    cls.Config(vocab_size=VOCAB_SIZE, **{key: value for key, value in config["model"].items() if key != "name"})
    train = config["train"]
    train["device"] = device
    train |= {name.removeprefix("train."): value for name, value in _FIXED.items()}
    # On a CPU, an update of one window takes long enough.
    if device == "cpu" and "train.chunk" not in given_by(overrides):
        train["chunk"] = window_of(config) * train["unroll"]
    typed(SpeechTrainConfig, train, section="train")
    del train["sample_seconds"]  # nobody listens
    return Job(
        f"{model} at {preset}", {"preset": preset, "model": model}, measure_model, {"config": config, "preset": preset}
    )
