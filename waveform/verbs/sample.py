"""`waveform sample`: generated audio into WAV files that grow as they are made."""

from pathlib import Path

import numpy as np

from waveform.audio import SAMPLE_RATE_HZ
from waveform.audio.files import read_audio
from waveform.audio.sinks import require_free, wav_files
from waveform.decoding.int8 import Int8Cost, int8_cost
from waveform.engine.dataset import is_dataset, read_dataset
from waveform.engine.sampler import SamplingConfig
from waveform.speech import Run, check_amount, load
from waveform.system.errors import UserError
from waveform.system.progress import Progress


def sample(
    run_dir: Path | str,
    out_dir: Path | str,
    *,
    num: int = 1,
    seconds: float = 1.0,
    sampling: SamplingConfig | None = None,
    prime: Path | None = None,
    device: str | None = None,
    show_progress: bool = True,
) -> list[Path]:
    """Write `num` WAV files of generated audio into `out_dir`, growing as they are made; returns their paths.

    Until all are done they are named `.unfinished.wav`; the next call that makes the same ones replaces them. With
    `prime`, an audio file, each WAV begins with it and continues it for `seconds`. What `sampling.int8` costs in NLL is
    measured and printed first. Files are named after model, step, seed and number; existing ones are never overwritten.
    Raises UserError as `load` does, and for a full disk.
    """
    out_dir = Path(out_dir)
    check_amount(num, seconds)  # settings out of range must leave no empty files behind
    if is_dataset(out_dir):
        raise UserError(f"--out {out_dir} is a prepared data set; give another folder")
    sampling = sampling or SamplingConfig()
    run = load(run_dir, device=device)
    cost = _int8_cost(run) if sampling.int8 else None
    if cost is not None and show_progress:
        print(cost, flush=True)
    primer = read_audio(prime) if prime is not None else None
    paths = [out_dir / f"{run.name}_step{run.step}_seed{sampling.seed}_{i}.wav" for i in range(num)]
    require_free(paths)
    with wav_files(paths) as write:
        if primer is not None:
            write(np.broadcast_to(primer, (num, len(primer))))
        with Progress("sample", total=num * seconds, unit="s", unit_s=1, enabled=show_progress) as progress:

            def take(block: np.ndarray) -> None:
                write(block)
                progress.update(block.size / SAMPLE_RATE_HZ)

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
