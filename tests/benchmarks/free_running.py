"""Measures what runs sound like when they go on for long from their own samples, beside recordings joined end to end.

    python -m tests.benchmarks.free_running DATA RUN_DIR ... [--num 64] [--seconds 20] [--prime 0.5] [--temperature 1]
        [--label NAME]

Every stream begins from nothing, or with --prime after so many seconds of a recording of the test split, which are not
measured; with --label, streams and recordings are of that one. Recordings are cut into clips as long as a stream, at
most four times as many as there are streams: half of them are the reference of distances, the other half the column
`real`. The last rows say whether sound drifts: level and pitch in the first and the last quarter of the streams.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import waveform
from waveform.audio.audio_format import AudioFormat, format_of
from waveform.engine.dataset import read_dataset
from waveform.engine.sampler import SamplingConfig
from waveform.quality.clip import Clip, measure_clip
from waveform.quality.figures import Figure, figures_of
from waveform.quality.report import shown
from waveform.speech.run import Run
from waveform.system.console import table

_ROWS = 16  # drawn side by side


def recordings(folder: Path, split: str, *, label: str | None = None) -> tuple[AudioFormat, list[np.ndarray]]:
    """The recordings of a split, or those with a label, each [n], in a random order that is always the same."""
    data = read_dataset(folder)
    tokens, audio_format = data.open_split(split), format_of(data.modality)
    order = np.random.default_rng(0).permutation(len(tokens.lengths))
    kept = [i for i in order if label in (None, tokens.labels[i])]
    pieces = [tokens.read(i, start=0, stop=int(tokens.lengths[i])) for i in kept]
    return audio_format, [audio_format.decode(piece) for piece in pieces]


def draw(
    run: Run, *, num: int, seconds: float, primes: Sequence[np.ndarray], temperature: float, label: str | None = None
) -> list[np.ndarray]:
    """Streams of a run, each [n]; `_ROWS` of them continue the same prime."""
    drawn: list[np.ndarray] = []
    while len(drawn) < num:
        prime = primes[len(drawn) // _ROWS % len(primes)] if primes else None
        rows = min(_ROWS, num - len(drawn))
        sampling = SamplingConfig(seed=len(drawn), temperature=temperature)
        labels = None if label is None else [label] * rows
        drawn += list(run.sample(num=rows, seconds=seconds, prime=prime, sampling=sampling, labels=labels))
    return drawn


def figures(streams: Sequence[np.ndarray], reference: Sequence[Clip], *, rate: int) -> dict[str, Figure]:
    """Figures of whole streams, and some of their first and last quarters."""
    found = {f"{one.name}, {one.unit}": one for one in figures_of(_measured(streams, rate), reference)}
    size = len(streams[0]) // 4
    for name, part in (("first quarter", slice(size)), ("last quarter", slice(-size, None))):
        of_part = figures_of(_measured([stream[part] for stream in streams], rate), reference)
        found |= {f"{name}: {one.name}": one for one in of_part if one.name in ("mean level", "frames with pitch")}
    return found


def _measured(streams: Sequence[np.ndarray], rate: int) -> list[Clip]:
    return [measure_clip(stream, sample_rate_hz=rate) for stream in streams]


if __name__ == "__main__":
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATASET")
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--num", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--prime", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--temperature", type=float, default=1)
    parser.add_argument("--label")
    given = parser.parse_args()
    audio_format, train = recordings(given.data, "train", label=given.label)
    rate = audio_format.sample_rate_hz
    joined = np.concatenate(train)
    size = round(given.seconds * rate)
    real = list(joined[: len(joined) // size * size].reshape(-1, size))[: 4 * given.num]
    half = len(real) // 2
    test = recordings(given.data, "test", label=given.label)[1] if given.prime else []
    primes = [clip[: round(given.prime * rate)] for clip in test]
    reference = _measured(real[:half], rate)
    columns = {"real": figures(real[half:], reference, rate=rate)}
    how = {name: vars(given)[name] for name in ("num", "seconds", "temperature", "label")}
    for name in given.runs:
        streams = draw(waveform.load(name), primes=primes, **how)
        columns[name] = figures(streams, reference, rate=rate)
    rows = [[row, *(shown(column[row]) for column in columns.values())] for row in columns["real"]]
    print("\n".join(table(["figure [95% interval]", *columns], rows)))
