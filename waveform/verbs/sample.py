"""`waveform sample`: draws audio, and writes it as it is drawn into WAV files or to stdout, or plays it."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from waveform.audio.files import read_audio
from waveform.audio.sinks import Output, require_free
from waveform.audio.speaker import require_sound_device
from waveform.decoding.int8_cost import Int8Cost, int8_cost
from waveform.engine.dataset import read_dataset
from waveform.engine.sampler import SamplingConfig
from waveform.engine.state_ram import require_ram_for_state
from waveform.ranks.distributed import SCORING_TIMEOUT_S, job
from waveform.speech.run import Run, check_amount, load
from waveform.system.errors import UserError
from waveform.system.progress import Progress

EACH = "each"  # as a label: all of them


@dataclass(frozen=True)
class SampleConfig(SamplingConfig):
    """How tokens are drawn, and for which label."""

    label: str | None = None  # one of the run's; each: all of them, unless one has that name; None: unknown


def sample(
    run_dir: Path | str,
    output: Output | Path | str,
    *,
    num: int = 1,
    seconds: float = 1.0,
    sampling: SampleConfig | SamplingConfig | None = None,
    prime: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> list[Path]:
    """Write `num` generated sounds into WAV files, or one to stdout, or play one, as drawn; return the files' paths.

    output: the folder, one file (*.wav), or an `Output`. With `prime`, an audio file, each sound begins with it and
    continues it for `seconds`, which may be inf if someone listens. What `sampling.int8` costs in NLL is measured and
    printed first. With a `SampleConfig`, `sampling.label` is the label of the sounds; with `each`, `num` are drawn for
    each label. Files in a folder are named after model, step, seed, how they are drawn, label and number; existing ones
    are never overwritten. Until all are done, their names end in `.unfinished.wav`; the next call that makes the same
    ones replaces these. Under torchrun every process calls this and draws a share of the same sounds. Raises UserError
    as `load` does, for a label that the run does not know, and for a full disk.
    """
    output = output if isinstance(output, Output) else Output(output)
    check_amount(num, seconds, endless=output.is_live)  # settings out of range must leave no empty files behind
    output.require_possible(num=num)
    sampling = sampling or SamplingConfig()
    with job(device=device, timeout_s=SCORING_TIMEOUT_S, show_progress=show_progress) as world:
        run = load(run_dir, device=world.device.type)
        while sum(world.largest(run.step, -run.step)):  # ranks opened different steps: training has just saved one
            run = load(run_dir, device=world.device.type)
        known = _labels(run, sampling)
        output.require_possible(num=num * len(known))
        require_ram_for_state(run.model, num * len(known))  # before a list of so many is made
        labels = [label for label in known for _ in range(num)]
        rate = run.audio_format.sample_rate_hz
        if output.play:
            require_sound_device(sample_rate_hz=rate)
        primer = run.audio_format.scale(read_audio(prime, sample_rate_hz=rate)) if prime is not None else None
        name = f"{run.name}_step{run.step}_seed{sampling.seed}{_drawn(sampling)}"
        paths = [] if output.file is None else [output.file]
        if output.folder is not None:
            numbered = [(name if label is None else f"{name}_{label}", i % num) for i, label in enumerate(labels)]
            paths = [output.folder / f"{beginning}_{i}.wav" for beginning, i in numbered]
        require_free(paths)
        if world.shows and sampling.int8:
            print(_int8_cost(run), file=sys.stderr if output.is_piped else sys.stdout, flush=True)
        world.barrier()  # files may appear now that every rank has checked the paths
        first, end = (-(-len(labels) * rank // world.size) for rank in (world.rank, world.rank + 1))
        own = labels[first:end]
        primer_s = 0 if primer is None else len(primer) / rate
        total_s = len(own) * seconds if math.isfinite(seconds) else None
        if own:
            with (
                Progress("sample", total=total_s, unit="s", unit_s=1, enabled=world.shows) as progress,
                output.open(
                    paths[first:end], sample_rate_hz=rate, seconds=primer_s + seconds, tell=progress.write
                ) as write,
            ):
                if primer is not None:
                    write(np.broadcast_to(primer, (len(own), len(primer))))

                def take(block: np.ndarray) -> None:
                    write(block)
                    progress.update(block.size / rate)

                own_streams = replace(sampling, first_stream=first)
                run.sample(num=len(own), seconds=seconds, sampling=own_streams, prime=primer, on_block=take, labels=own)
        world.barrier()
        if world.shows:
            for path in paths:
                print(path)
    return paths


def _labels(run: Run, sampling: SamplingConfig) -> list[str | None]:
    """The labels that are sampled; None: unknown. Raises UserError for one that the run does not know."""
    label = sampling.label if isinstance(sampling, SampleConfig) else None
    if label == EACH and run.labels and EACH not in run.labels:
        return list(run.labels)
    run.label_number(label)
    return [label]


def _drawn(sampling: SamplingConfig) -> str:
    """The part of a file's name that says how a sound is drawn, such as `_temperature0.9`; empty for the defaults."""
    usual, names = SamplingConfig(), ("temperature", "top_k", "top_p", "int8")
    changed = {name: value for name in names if (value := getattr(sampling, name)) != getattr(usual, name)}
    return "".join(f"_{name}" if value is True else f"_{name}{value}" for name, value in changed.items())


def _int8_cost(run: Run) -> Int8Cost:
    """What int8 costs on the validation split of the run's data, or on what the model samples if the data is gone."""
    dataset = run.config["dataset"]
    try:
        split = read_dataset(Path(dataset["path"])).open_split("valid")
    except UserError:  # gone or damaged; sampling does not need it
        split = None
    return int8_cost(run.model, split, vocab_size=int(dataset["vocab_size"]), window=run.window)
