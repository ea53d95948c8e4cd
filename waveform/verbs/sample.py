"""`waveform sample`: generated audio, as it is drawn, into WAV files or stdout, or through the sound device."""

import math
import sys
from pathlib import Path

import numpy as np

from waveform.audio.files import read_audio
from waveform.audio.sinks import Output, require_free
from waveform.decoding.int8 import Int8Cost, int8_cost
from waveform.engine.dataset import is_dataset, read_dataset
from waveform.engine.sampler import SamplingConfig
from waveform.speech import Run, check_amount, load
from waveform.system.errors import UserError
from waveform.system.progress import Progress


def sample(
    run_dir: Path | str,
    output: Output | Path | str,
    *,
    num: int = 1,
    seconds: float = 1.0,
    sampling: SamplingConfig | None = None,
    prime: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> list[Path]:
    """Write `num` generated sounds into WAV files, or one to stdout, or play one, as drawn; returns the files' paths.

    output: the folder, or an `Output`. With `prime`, an audio file, each sound begins with it and continues it for
    `seconds`; they may be inf if someone listens. What `sampling.int8` costs in NLL is measured and printed first.
    Files are named after model, step, seed and number; existing ones are never overwritten. Until all are done they are
    named `.unfinished.wav`; the next call that makes the same ones replaces them. Raises UserError as `load` does, and
    for a full disk.
    """
    output = output if isinstance(output, Output) else Output(output)
    check_amount(num, seconds, endless=output.is_live)  # settings out of range must leave no empty files behind
    output.require_possible(num=num)
    sampling = sampling or SamplingConfig()
    run = load(run_dir, device=device)
    rate = run.audio_format.sample_rate_hz
    output.require_playable(rate)
    cost = _int8_cost(run) if sampling.int8 else None
    if cost is not None and show_progress:
        print(cost, file=sys.stderr if output.is_piped else sys.stdout, flush=True)
    primer = run.audio_format.scale(read_audio(prime, sample_rate_hz=rate)) if prime is not None else None
    name = f"{run.name}_step{run.step}_seed{sampling.seed}"
    paths = [output.folder / f"{name}_{i}.wav" for i in range(num)] if output.folder is not None else []
    require_free(paths)
    primer_s = 0 if primer is None else len(primer) / rate
    total_s = num * seconds if math.isfinite(seconds) else None
    with (
        Progress("sample", total=total_s, unit="s", unit_s=1, enabled=show_progress) as progress,
        output.open(paths, sample_rate_hz=rate, seconds=primer_s + seconds, tell=progress.write) as write,
    ):
        if primer is not None:
            write(np.broadcast_to(primer, (num, len(primer))))

        def take(block: np.ndarray) -> None:
            write(block)
            progress.update(block.size / rate)

        run.sample(num=num, seconds=seconds, sampling=sampling, prime=primer, on_block=take)
    if show_progress:
        for path in paths:
            print(path)
    return paths


def _int8_cost(run: Run) -> Int8Cost:
    """What int8 costs on the validation split of the run's data, or on what the model samples if the data is gone."""
    dataset = run.config["dataset"]
    folder = Path(dataset["path"])
    try:
        split = read_dataset(folder).open_split("valid") if is_dataset(folder) else None
    except UserError:  # damaged; sampling does not need it
        split = None
    return int8_cost(run.model, split, vocab_size=int(dataset["vocab_size"]), window=run.window)
