"""`waveform bench`: composes presets into models, measures each in a process of its own, prints and writes the figures.

Processes, because peak memory is a process's, and so that a model that fails or runs out of memory spoils no other.
Within a process the limits are measured in turn with the speeds; two processes' speeds are not measured in turn.
"""

import datetime
import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from waveform.audio import SAMPLE_RATE_HZ
from waveform.benchmarks.measure import BACKWARD_FACTOR, measure_sampling, measure_training, updates_needed
from waveform.engine.shards import Shard, ShardWriter
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import RunContext, Trainer
from waveform.models.registry import model_class, model_names
from waveform.ranks.distributed import World, choose_device
from waveform.runs.configured_model import model_from, num_parameters, window_of
from waveform.runs.settings import typed
from waveform.speech import SpeechTrainConfig, compose_config
from waveform.system.atomic import require_writable
from waveform.system.console import table
from waveform.system.errors import UserError
from waveform.system.machine import describe_machine, resident_bytes
from waveform.system.output import write_json
from waveform.system.progress import Progress

PRESETS = ("small", "speech_paper")
_VOCAB_SIZE = 256
_BATCH_SIZE = {"cpu": 1, "cuda": 32}
_STREAMS = {"cpu": (1, 4), "cuda": (1, 64)}  # sampled side by side
_CHILD = (
    "import sys; from waveform.system.cpu import set_defaults; set_defaults(); "
    "from waveform.verbs.bench import run_job; run_job(*sys.argv[1:])"
)


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
    """Measure `models` at `presets` on synthetic tokens, and data preparation; print a table, return all figures.

    models: None for every registered one; overrides: `key=value` settings for each of them; audio_minutes: of FLAC to
    prepare, 0 for none. An update has 1 row on a CPU and 32 on CUDA unless train.batch_size is set; a CPU updates once
    per window, CUDA once per chunk of the preset. Raises UserError for bad settings and, before any work, for a
    `json_file` that cannot be written; and at the end, when everything has been printed and written, if a measurement
    failed.
    """
    chosen = choose_device(device)
    require_writable(json_file, option="--json")
    if not 0 <= audio_minutes < math.inf:
        raise UserError(f"--audio-minutes {audio_minutes}: give 0 or more")
    jobs: list[dict[str, Any]] = [
        _model_job(model, preset, chosen, overrides, None if config_dir is None else Path(config_dir))
        for preset in presets or PRESETS
        for model in models or model_names()
    ]
    if audio_minutes:
        jobs += [{"kind": "preparation", "minutes": audio_minutes, "channels": channels} for channels in (1, 2)]
    options = {"--device": chosen, "--model": models, "--preset": presets,
               "--audio-minutes": audio_minutes, "--json": json_file, "--config-dir": config_dir}  # fmt: skip
    content: dict[str, Any] = {
        "command": _command_line(options, overrides),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(torch.device(chosen)),
        "model_flops": f"{BACKWARD_FACTOR} x the matrix products of a forward, and once those of auxiliary losses",
        "models": [],
        "preparation": [],
    }
    failed = []
    with Progress("bench", total=len(jobs), unit="measurement", enabled=show_progress) as progress:
        for job in jobs:
            figures = _run_in_child(job)
            content["models" if job["kind"] == "model" else "preparation"].append(figures)
            if "error" in figures:
                failed.append(figures)
                progress.write(f"failed: {_title(job)}: {figures['error']}")
            progress.update()
    if show_progress:
        print(format_figures(content))
    write_json(json_file, content)
    if failed:
        raise UserError(f"{len(failed)} of {len(jobs)} measurements failed, the first with: {failed[0]['error']}")
    return content


def _command_line(options: dict[str, Any], overrides: Sequence[str]) -> str:
    words = ["waveform", "bench", *overrides]
    for option, value in options.items():
        if value is not None:
            words += [option, *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return shlex.join(words)


def _model_job(
    model: str, preset: str, device: str, overrides: Sequence[str], config_dir: Path | None
) -> dict[str, Any]:
    """What a child needs to measure one model. Raises UserError for settings that it would refuse."""
    cls = model_class(model)
    asked = [f"preset={preset}", f"model={model}", f"train.batch_size={_BATCH_SIZE[device]}", *overrides]
    config = compose_config(asked, config_dir=config_dir)
    cls.Config(vocab_size=_VOCAB_SIZE, **{key: value for key, value in config["model"].items() if key != "name"})
    train = config["train"]
    train["device"] = device
    # No state may reset while updates are timed, and an update of one window is enough of a CPU's time.
    train["state"] = "utterance"
    if device == "cpu" and not any(setting.startswith("train.chunk=") for setting in overrides):
        train["chunk"] = window_of(config) * train["unroll"]
    typed(SpeechTrainConfig, train, section="train")
    return {"kind": "model", "preset": preset, "config": config}


def _title(job: dict[str, Any]) -> str:
    if job["kind"] == "model":
        return f"{job['config']['model']['name']} at {job['preset']}"
    return f"preparation with {job['channels']} channels"


def _run_in_child(job: dict[str, Any]) -> dict[str, Any]:
    """The figures of a job, or what names it and its `error`."""
    with tempfile.TemporaryDirectory(prefix="waveform-bench-") as scratch:
        job_file, result_file = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job_file.write_text(json.dumps({**job, "scratch": scratch}))
        # -P: nothing in the folder where the command was started may stand in for a module.
        command = [sys.executable, "-P", "-c", _CHILD, str(job_file), str(result_file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0 and result_file.exists():
            return json.loads(result_file.read_text())
        named = {"preset": job["preset"], "model": job["config"]["model"]["name"]} if job["kind"] == "model" else job
        if done.returncode < 0:
            by = signal.Signals(-done.returncode).name
            return {**named, "error": f"killed by {by}" + (" (out of memory?)" if by == "SIGKILL" else "")}
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {**named, "error": last[0]}


def run_job(job_file: str, result_file: str) -> None:
    """What a child process does: one measurement, from one JSON file into another."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback; the parent speaks for it
    job = json.loads(Path(job_file).read_text())
    if job["kind"] == "model":
        figures = measure_model(job["config"], preset=job["preset"], scratch=Path(job["scratch"]))
    else:
        from waveform.audio.corpus.speed import measure_preparation

        figures = measure_preparation(job["minutes"], num_channels=job["channels"])
    Path(result_file).write_text(json.dumps(figures))


def measure_model(config: dict[str, Any], *, preset: str, scratch: Path) -> dict[str, Any]:
    """Train and sample one model on random tokens in `scratch`, an empty folder; returns its figures.

    To be called in a fresh process: peak memory counts all that the process ever held.
    """
    imports_bytes = resident_bytes()
    train_config: SpeechTrainConfig = typed(SpeechTrainConfig, config["train"], section="train")
    device = torch.device(train_config.device or "cpu")
    torch.manual_seed(config["seed"])
    window = window_of(config)
    tokens = _random_tokens(scratch, num_rows=train_config.batch_size, length=updates_needed() * train_config.chunk)
    model = model_from({**config, "dataset": {"vocab_size": _VOCAB_SIZE}})
    trainer = Trainer(
        model,
        train_config,
        train=tokens,
        valid=tokens,
        window=window,
        seed=config["seed"],
        context=RunContext(scratch, World(device=device), show_progress=False),
    )
    training = measure_training(trainer, window=window, vocab_size=_VOCAB_SIZE)
    peak_bytes = training.pop("peak_bytes")
    trainer.module.eval().requires_grad_(False)
    sampling = measure_sampling(
        model, trainer.state, window=window, vocab_size=_VOCAB_SIZE, stream_counts=_STREAMS[device.type]
    )
    autocast = train_config.autocast(device)
    return {
        "preset": preset,
        "model": config["model"]["name"],
        "num_parameters": num_parameters(model),
        "batch_size": train_config.batch_size,
        "window": window,
        "chunk": train_config.chunk,
        "precision": str(autocast or torch.float32).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "training": training,
        "training_memory": {
            "kind": "allocated on the GPU" if device.type == "cuda" else "resident",
            "peak_bytes": peak_bytes,
            "imports_bytes": 0 if device.type == "cuda" else imports_bytes,
            "peak_without_imports_bytes": peak_bytes - (0 if device.type == "cuda" else imports_bytes),
        },
        "sampling": sampling,
        "model_config": dict(config["model"]),
    }


def _random_tokens(folder: Path, *, num_rows: int, length: int) -> TokenSet:
    """A data set of one utterance a row, so that no row's state resets while it is read."""
    path = folder / "random.shard"
    rng = np.random.default_rng(0)
    with ShardWriter(path, vocab_size=_VOCAB_SIZE) as writer:
        for row in range(num_rows):
            writer.begin(str(row))
            writer.append(rng.integers(_VOCAB_SIZE, size=length, dtype=np.uint8))
    return TokenSet([Shard(path)], vocab_size=_VOCAB_SIZE)


def format_figures(content: dict[str, Any]) -> str:
    """What `bench` returns, as tables for a terminal."""
    machine = content["machine"]
    hardware = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    lines = [f"{hardware}; torch {machine['torch']}, waveform {machine['waveform']}"]
    measured = [figures for figures in content["models"] if "error" not in figures]
    lines += ["", *table(["training", "", "", "samples/s (min to max)", "real time", "FLOP use", "peak memory"],
                          [_training_row(figures) for figures in measured])]  # fmt: skip
    lines += ["", *table(["sampling", "", "", "samples/s (min to max)", "real time", "of bound", "read a step"],
                          list(_sampling_rows(measured)))]  # fmt: skip
    prepared = [figures for figures in content["preparation"] if "error" not in figures]
    if prepared:
        header = ["preparation", "", "real time (min to max)", "of limit", "decode", "resample", "peak memory"]
        lines += ["", *table(header, [_preparation_row(figures) for figures in prepared])]
    lines += ["", *_legend(measured)]
    return "\n".join(lines)


def _training_row(figures: dict[str, Any]) -> list[str]:
    training, memory = figures["training"], figures["training_memory"]
    speed = training["tokens_per_second"]
    return [
        figures["preset"],
        figures["model"],
        f"{figures['num_parameters'] / 1e6:.1f} M x {figures['batch_size']}",
        _with_range(speed),
        f"{speed['median'] / SAMPLE_RATE_HZ:.3g} x",
        f"{training['model_flop_utilisation']:.0%} of {training['matrix_flops_per_second']['median'] / 1e9:,.0f} G/s",
        f"{memory['peak_bytes'] / 1e6:,.0f} MB",
    ]


def _sampling_rows(measured: list[dict[str, Any]]) -> Iterator[list[str]]:
    for figures in measured:
        for case in figures["sampling"]:
            speed, share = case["samples_per_second"], case["share_of_bound"]
            rate = case["memory_bytes_per_second"]["median"]
            several = len({other["decoder"] for other in figures["sampling"]}) > 1
            streams = f"{case['num_streams']} stream" + "s" * (case["num_streams"] > 1)
            yield [
                figures["preset"],
                figures["model"],
                f"{streams}, {case['decoder']}" if several else streams,
                _with_range(speed),
                f"{speed['median'] / SAMPLE_RATE_HZ:.3g} x",
                "-" if share is None else f"{share:.0%} of {rate / 1e9:,.0f} GB/s",
                "-" if case["bytes_per_step"] is None else f"{case['bytes_per_step'] / 1e6:,.1f} MB",
            ]


def _preparation_row(figures: dict[str, Any]) -> list[str]:
    return [
        f"{figures['audio_seconds'] / 60:g} min FLAC",
        "mono" if figures["channels"] == 1 else "stereo",
        _with_range(figures["times_real_time"]),
        f"{figures['share_of_limit']:.0%} of {figures['limit_times_real_time']:,.0f} x",
        f"{figures['decode_times_real_time']['median']:,.0f} x",
        f"{figures['resample_times_real_time']['median']:,.0f} x",
        f"{figures['peak_bytes'] / 1e6:,.0f} MB",
    ]


def _legend(measured: list[dict[str, Any]]) -> list[str]:
    lines = [
        "training: updates with full memories; M parameters x rows. FLOP use: model FLOPs (3 x a forward's, and once",
        "those of auxiliary losses) over the rate of a large matrix product. sampling: with full memories. of bound:",
        "weights and cache that a step reads, over memory's rate; above 100% they fit into the processor's cache.",
        "Medians; min to max over repeats in turn with the limits. preparation: 44.1 kHz, one worker on one core.",
    ]
    if measured and all(not figures["training_memory"]["imports_bytes"] for figures in measured):
        return [*lines, "peak memory: allocated on the GPU in training."]
    imports = {f"{figures['training_memory']['imports_bytes'] / 1e6:,.0f}" for figures in measured[:1]}
    return [*lines, *(f"peak memory: resident in training, some {size} MB of it the imports." for size in imports)]


def _with_range(values: dict[str, float]) -> str:
    return f"{_number(values['median'])} ({_number(values['min'])} to {_number(values['max'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
