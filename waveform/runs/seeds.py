"""A figure from several seeds: its mean and interval, in the tables of studies and races."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def mean_and_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over seeds, with its 95% interval by Student's t (None for a single seed), and the values."""
    from scipy.stats import t as student_t

    mean, num = float(np.mean(values)), len(values)
    interval = None
    if num > 1:
        half = float(student_t.ppf(0.975, num - 1) * np.std(values, ddof=1)) / num**0.5
        interval = [mean - half, mean + half]
    return {"mean": mean, "interval_95": interval, "seeds": list(values)}


def shown(figure: dict[str, Any], decimals: int = 4) -> str:
    """A figure of `mean_and_interval` for a table."""
    text = f"{figure['mean']:.{decimals}f}"
    if figure["interval_95"] is not None:
        text += " [{:.{d}f}, {:.{d}f}]".format(*figure["interval_95"], d=decimals)
    return text
