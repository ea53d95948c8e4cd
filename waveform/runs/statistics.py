"""95% intervals of means, over seeds by Student's t and over utterances by the bootstrap, and how they are shown."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from waveform.engine.evaluator import Evaluation

_FEWEST_UTTERANCES = 5  # for an interval that means something


def students_t(num: int) -> float:
    """Half the width of a 95% interval of the mean of `num` values, at least two, in standard errors."""
    from scipy.stats import t  # it takes a second to import

    return float(t.ppf(0.975, num - 1))


def mean_and_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over seeds, with its 95% interval by Student's t (None for a single seed), and the values."""
    mean, num = float(np.mean(values)), len(values)
    interval = None
    if num > 1:
        half = float(students_t(num) * np.std(values, ddof=1)) / num**0.5
        interval = [mean - half, mean + half]
    return {"mean": mean, "interval_95": interval, "seeds": list(values)}


def interval_over_utterances(nats: np.ndarray, counts: np.ndarray, *, resamples: int = 10_000) -> list[float] | None:
    """95% interval of the nats per token, by the bootstrap over utterances (percentiles; Efron and Tibshirani 1993).

    nats, counts: [N], of each utterance. Each resample draws utterances with replacement. None for fewer than five.
    """
    if len(counts) < _FEWEST_UTTERANCES:
        return None
    rng = np.random.default_rng(0)
    means = []
    for _ in range(resamples):
        chosen = rng.integers(len(counts), size=len(counts))
        means.append(nats[chosen].sum() / counts[chosen].sum())
    return [float(end) for end in np.quantile(means, [0.025, 0.975])]


def paired_interval(a: Evaluation, b: Evaluation) -> list[float] | None:
    """95% interval of NLL(a) - NLL(b), nats per token: each resample draws the same utterances for both models."""
    return interval_over_utterances(a.nats - b.nats, a.counts)


def with_intervals(value: float, *intervals: Sequence[float] | None, decimals: int = 4, sign: str = "") -> str:
    """`1.2345 [1.2000, 1.2700]`, with all intervals that are not None; sign: "+" for a difference."""
    form = f"{sign}.{decimals}f"
    known = [interval for interval in intervals if interval is not None]
    return " ".join([f"{value:{form}}", *(f"[{low:{form}}, {high:{form}}]" for low, high in known)])


def shown(figure: dict[str, Any], decimals: int = 4) -> str:
    """A figure of `mean_and_interval` for a table."""
    return with_intervals(figure["mean"], figure["interval_95"], decimals=decimals)
