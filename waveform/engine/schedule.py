"""Learning rate and update period as functions of training progress."""

import math

FLOOR_LR = 1e-6  # at which warm-up begins and the cosine ends (Rae et al. 2019, section 5)


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    decayed: float,
    change_at: int | None = None,
    after: float = 0.0,
    floor: float = FLOOR_LR,
) -> float:
    """Linear warm-up from `floor` to `peak`, then a cosine to `floor`; `after` from step `change_at` on.

    `step` counts from 0; `decayed` in [0, 1] is the share of the decay that has passed. A peak below the floor is kept.
    """
    if change_at is not None and step >= change_at:
        return after
    floor = min(floor, peak)
    warm = floor + (peak - floor) * min(1.0, (step + 1) / max(warmup_steps, 1))
    cosine = floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(max(decayed, 0.0), 1.0)))
    return min(warm, cosine)


def update_period(step: int, *, late_period: int, change_at: int) -> int:
    """Chunks whose gradients make one update: 1, then `late_period` from step `change_at` on (section 5.5.1)."""
    return late_period if step >= change_at else 1


def updates_until(step: int, *, late_period: int, change_at: int) -> int:
    """Updates made by `step`, at which a training arrived by the periods of `update_period`."""
    early = min(step, change_at)
    return early + (step - early) // late_period
