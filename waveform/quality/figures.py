"""The figures of quality of a set of clips, with intervals: distances to real clips, and its own pitch, level, ..."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy import stats
from sklearn.covariance import ledoit_wolf

from waveform.quality.clip import REFERENCE_HZ, Clip
from waveform.runs.statistics import students_t

Statistic = Callable[[Sequence[Clip]], float | None]  # None: there is nothing to measure

_TRIALS = 50  # random draws of real clips, for the distance that they have by chance
_BOUNDS = {"share": (0.0, 1.0), "1 to 5": (1.0, 5.0), "dBFS": (-np.inf, np.inf)}  # of figures, by unit; others: 0, inf


@dataclass(frozen=True)
class Figure:
    """A figure and its 95% interval: the jackknife over clips, Student's t (Efron and Tibshirani 1993, ch. 11)."""

    name: str
    unit: str
    value: float | None  # None: there is nothing to measure, for example no pitch
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SetOfClips:
    """The figures of one set: a run's samples, held-out real clips, or white noise."""

    name: str
    num_clips: int
    figures: list[Figure]


@dataclass(frozen=True)
class Quality:
    """Every set of clips, each compared with the same other real clips, and how they were made."""

    sets: list[SetOfClips]
    num_reference: int  # other real clips
    by_chance: Figure  # Frechet distance of some of these, as many as samples, to the rest: its bias
    seconds: float  # of each clip
    temperature: float
    seed: int


def figures_of(clips: Sequence[Clip], reference: Sequence[Clip]) -> list[Figure]:
    """Every figure of `clips`; distances are to `reference`, other real clips."""
    measured: list[tuple[str, str, Statistic]] = [
        ("Frechet distance", "dB^2", partial(_frechet, reference)),
        ("pitch, distance", "semitones", partial(_distance, "semitones", reference)),
        ("level, distance", "dB", partial(_distance, "level_db", reference)),
        ("mean pitch", "Hz", _mean_pitch),
        ("spread of pitch", "semitones", partial(_over_frames, np.std, "semitones")),
        ("mean level", "dBFS", partial(_over_frames, np.mean, "level_db")),
        ("spread of level", "dB", partial(_over_frames, np.std, "level_db")),
        *((name, "share", partial(_mean, "shares", name)) for name in clips[0].shares),
        *((name, "1 to 5", partial(_mean, "opinions", name)) for name in clips[0].opinions),
    ]
    return [jackknife(name, unit, clips, statistic) for name, unit, statistic in measured]


def jackknife(name: str, unit: str, clips: Sequence[Clip], statistic: Statistic) -> Figure:
    """A statistic of at least two clips, with its interval, cut off at the least and the greatest possible value."""
    value = statistic(clips)
    without = [statistic([*clips[:i], *clips[i + 1 :]]) for i in range(len(clips))]
    if value is None or None in without:
        return Figure(name, unit, value, None, None)
    num, (least, greatest) = len(clips), _BOUNDS.get(unit, (0.0, np.inf))
    half = float(students_t(num) * np.sqrt((num - 1) * np.var(np.array(without, dtype=np.float64))))
    return Figure(name, unit, value, max(least, value - half), min(greatest, value + half))


def frechet_by_chance(reference: Sequence[Clip], *, num: int, seed: int) -> Figure:
    """Mean Frechet distance of `num` real clips to others, and where 95% of the draws lie: its bias at this number."""
    rng = np.random.default_rng(seed)
    distances = []
    for _ in range(_TRIALS):
        order = rng.permutation(len(reference))
        some, others = ([reference[i] for i in part] for part in (order[:num], order[num:]))
        distances.append(_frechet(others, some))
    low, high = np.quantile(distances, [0.025, 0.975])
    return Figure("Frechet distance by chance", "dB^2", float(np.mean(distances)), float(low), float(high))


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of vectors [n, d] and [m, d] (Dowson and Landau 1982).

    Covariances are shrunk to a multiple of the identity (Ledoit and Wolf 2004), so n may be smaller than d. It is
    biased upwards, more so the fewer vectors there are: compare distances of equally many, or with that of as many
    real ones.
    """
    (covariance_a, _), (covariance_b, _) = ledoit_wolf(a), ledoit_wolf(b)
    values, vectors = np.linalg.eigh(covariance_a)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.linalg.eigvalsh(root @ covariance_b @ root)  # the eigenvalues of C_a C_b
    overlap = np.sqrt(np.maximum(cross, 0)).sum()
    moved = np.square(a.mean(axis=0) - b.mean(axis=0)).sum()
    return max(float(moved + np.trace(covariance_a) + np.trace(covariance_b) - 2 * overlap), 0.0)


def _frechet(reference: Sequence[Clip], clips: Sequence[Clip]) -> float:
    ours, theirs = (np.concatenate([clip.pieces for clip in some]) for some in (clips, reference))
    return frechet_distance(ours, theirs)


def _distance(field: str, reference: Sequence[Clip], clips: Sequence[Clip]) -> float | None:
    """How far the values of all frames would have to move, on average, to be distributed as those of `reference`."""
    ours, theirs = (np.concatenate([getattr(clip, field) for clip in some]) for some in (clips, reference))
    return float(stats.wasserstein_distance(ours, theirs)) if len(ours) and len(theirs) else None


def _over_frames(reduce: Callable[[np.ndarray], Any], field: str, clips: Sequence[Clip]) -> float | None:
    values = np.concatenate([getattr(clip, field) for clip in clips])
    return float(reduce(values)) if len(values) else None


def _mean_pitch(clips: Sequence[Clip]) -> float | None:
    """Geometric mean of the pitch in Hz."""
    semitones = _over_frames(np.mean, "semitones", clips)
    return None if semitones is None else REFERENCE_HZ * 2 ** (semitones / 12)


def _mean(field: str, name: str, clips: Sequence[Clip]) -> float:
    return float(np.mean([getattr(clip, field)[name] for clip in clips]))
