"""V-trace equals the paper's definition."""

import numpy as np
import pytest
import torch

from recipes.reinforcement.vtrace import vtrace
from tests.references.vtrace import vtrace_target

B, T = 4, 9


@pytest.mark.parametrize("clips", [{}, {"clip_rho": 0.7, "clip_c": 1.3}])
def test_targets_are_those_of_the_definition(clips: dict[str, float]) -> None:
    random = np.random.default_rng(0)
    log_ratios, rewards = random.standard_normal((2, B, T))
    values = random.standard_normal((B, T + 1))  # the last ones are of what follows
    discounts = 0.9 * (random.random((B, T)) >= 0.2)
    given = (log_ratios, rewards, discounts, values[:, :-1], values[:, -1])
    made = vtrace(*map(torch.from_numpy, given), **clips)
    for row, ratios in enumerate(np.exp(log_ratios)):
        one = {"ratios": ratios, "rewards": rewards[row], "discounts": discounts[row], "values": values[row]}
        targets = [vtrace_target(start=t, **one, **clips) for t in range(T)]
        np.testing.assert_allclose(made.values[row], targets, rtol=0, atol=1e-12)
        following = np.array([*targets[1:], values[row, -1]])
        rhos = np.minimum(clips.get("clip_rho", 1.0), ratios)
        advantages = rhos * (rewards[row] + discounts[row] * following - values[row, :-1])
        np.testing.assert_allclose(made.advantages[row], advantages, rtol=0, atol=1e-12)
