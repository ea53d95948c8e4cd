"""V-trace as the paper defines it (Espeholt et al. 2018, equation 1): a sum over products, row by row, in fp64."""

import numpy as np


def vtrace_target(
    *,
    start: int,
    ratios: np.ndarray,
    rewards: np.ndarray,
    discounts: np.ndarray,
    values: np.ndarray,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> float:
    """v at `start` of one row; values [T + 1] have the bootstrap at their end, the others are [T]."""
    target = values[start]
    for t in range(start, len(rewards)):
        product = 1.0
        for i in range(start, t):
            product *= discounts[i] * min(clip_c, ratios[i])
        delta = min(clip_rho, ratios[t]) * (rewards[t] + discounts[t] * values[t + 1] - values[t])
        target = target + product * delta
    return float(target)
