"""V-trace equals the paper's definition."""

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.reinforcement.vtrace import vtrace
from tests.references.vtrace import vtrace_target

B, T = 4, 9


def drawn(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    ended = torch.rand(B, T, generator=random) < 0.2
    drawn = {"log_ratios": normal(B, T), "rewards": normal(B, T), "discounts": 0.9 * (~ended).double()}
    return drawn | {"values": normal(B, T), "bootstrap": normal(B)}


@pytest.mark.parametrize("clips", [{}, {"clip_rho": 0.7, "clip_c": 1.3}])
def test_targets_are_those_of_the_definition(clips: dict[str, float]) -> None:
    given = drawn()
    made = vtrace(**given, **clips)
    values = torch.cat([given["values"], given["bootstrap"][:, None]], dim=1).numpy()
    ratios = given["log_ratios"].exp().numpy()
    arrays = {name: given[name].numpy() for name in ("rewards", "discounts")}
    for row in range(B):
        one = {name: array[row] for name, array in arrays.items()}
        targets = [vtrace_target(start=t, ratios=ratios[row], values=values[row], **one, **clips) for t in range(T)]
        assert np.allclose(made.values[row], targets, rtol=0, atol=1e-12)
        following = np.array([*targets[1:], values[row, -1]])
        rhos = np.minimum(clips.get("clip_rho", 1.0), ratios[row])
        advantages = rhos * (one["rewards"] + one["discounts"] * following - values[row, :-1])
        assert np.allclose(made.advantages[row], advantages, rtol=0, atol=1e-12)
