"""Measures samples of runs beside held-out real clips and white noise: from tokens and models to `Quality`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from waveform.audio.audio_format import AudioFormat
from waveform.engine.sampler import SamplingConfig
from waveform.engine.token_set import TokenSet
from waveform.quality.clip import Clip, measure_clip
from waveform.quality.config import FEWEST_CLIPS, QualityConfig
from waveform.quality.figures import Quality, SetOfClips, figures_of, frechet_by_chance
from waveform.quality.opinion_scores import Predict, opinions_of, predictors
from waveform.system.errors import UserError
from waveform.system.progress import Progress

_NUM_REFERENCE = 200  # real clips to compare with; more if there are more than 100 samples
_SAMPLING_ROWS = 16  # samples that are drawn side by side
_NOISE_AMPLITUDE = 0.1  # RMS, about that of speech


class Sampled(Protocol):
    """What measuring needs of a run: its format, and sounds that it draws."""

    @property
    def audio_format(self) -> AudioFormat: ...

    def sample(self, *, num: int, seconds: float, sampling: SamplingConfig) -> np.ndarray:
        """Sounds [num, n]."""
        ...


def measure_quality(
    runs: Sequence[tuple[str, Sampled]],
    config: QualityConfig,
    *,
    held_out: TokenSet,
    others: TokenSet,
    show_progress: bool = True,
) -> Quality:
    """Figures of the samples of each run (label, run), of clips of `held_out` and of white noise, against `others`.

    held_out, others: audio of two splits; the runs have not learned from the first. Raises UserError if both are the
    same split, and if a split has fewer clips of config.seconds than are needed.
    """
    if held_out.checksum == others.checksum:
        raise UserError("quality compares samples with clips that were not learned from; give another --split")
    audio_format = runs[0][1].audio_format
    rate = audio_format.sample_rate_hz
    length = round(config.seconds * rate)
    rng = np.random.default_rng(config.seed)
    fewest = 2 * config.num  # half of them for the distance by chance, and half to compare these with
    reference = real_clips(
        others, audio_format, length=length, num=max(_NUM_REFERENCE, fewest), at_least=fewest, rng=rng
    )
    real = real_clips(held_out, audio_format, length=length, num=config.num, at_least=FEWEST_CLIPS, rng=rng)
    noise = [_NOISE_AMPLITUDE * rng.standard_normal(length).astype(np.float32) for _ in range(config.num)]
    found = predictors()
    num_clips = len(runs) * config.num + len(real) + len(noise) + len(reference)
    with Progress("quality", total=num_clips, unit="clip", enabled=show_progress) as progress:

        def measured(clip: np.ndarray, found: dict[str, Predict]) -> Clip:
            progress.update(1)
            return measure_clip(clip, sample_rate_hz=rate, opinions=opinions_of(clip, found, sample_rate_hz=rate))

        compared = [measured(clip, {}) for clip in reference]
        drawn = [(label, draw_samples(run, config)) for label, run in runs]
        sets = [
            SetOfClips(name, len(clips), figures_of([measured(clip, found) for clip in clips], compared))
            for name, clips in [*drawn, ("real, held out", real), ("white noise", noise)]
        ]
    return Quality(
        sets=sets,
        num_reference=len(compared),
        by_chance=frechet_by_chance(compared, num=config.num, seed=config.seed),
        seconds=config.seconds,
        temperature=config.temperature,
        seed=config.seed,
    )


def draw_samples(run: Sampled, config: QualityConfig) -> list[np.ndarray]:
    """Samples of a run, each [n]."""
    clips: list[np.ndarray] = []
    while len(clips) < config.num:
        num = min(_SAMPLING_ROWS, config.num - len(clips))
        sampling = SamplingConfig(temperature=config.temperature, seed=config.seed + len(clips))
        clips += list(run.sample(num=num, seconds=config.seconds, sampling=sampling))
    return clips


def real_clips(
    tokens: TokenSet, audio_format: AudioFormat, *, length: int, num: int, at_least: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draw up to `num` clips [length] from the utterances of a split, none of which overlap, without replacement.

    Raises UserError if there are fewer than `at_least`.
    """
    places = [
        (index, start)
        for index, total in enumerate(tokens.lengths)
        for start in range(0, int(total) - length + 1, length)
    ]
    if len(places) < at_least:
        raise UserError(
            f"quality needs {at_least} real clips of {length / audio_format.sample_rate_hz:g} s, and a split of this "
            f"data has {len(places)}; lower --seconds (to 1 at least) or --num (to {FEWEST_CLIPS}), or give a larger "
            "data set by --data"
        )
    chosen = rng.permutation(len(places))[:num]
    pieces = [tokens.read(places[i][0], start=places[i][1], stop=places[i][1] + length) for i in chosen]
    return [audio_format.decode(piece) for piece in pieces]
