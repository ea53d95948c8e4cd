"""Encoders: what an agent makes of an observation, and what training counts for it."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from recipes.reinforcement.agent import Encoder, GridEncoder
from recipes.reinforcement.environment import Observation
from tests.recipes.reinforcement.small import small_learner

_CELLS, _VALUES = 3, 4
_GRID = Observation("grid", (_CELLS,), _VALUES)


def test_a_grid_is_standardised() -> None:
    """Equal to a layer on zeros and ones, from which their means over all observations are taken, as written out."""
    torch.manual_seed(0)
    encoder, random = GridEncoder(_GRID, 8).double(), np.random.default_rng(0)
    # The first cell never changes, and the last has a rare value.
    cells = np.stack([np.full(50, 2), random.integers(0, 3, 50), random.random(50) < 0.1], axis=1)
    observed = torch.from_numpy(cells.astype(np.uint8))
    for part in observed.split([20, 30]):
        encoder.seen += encoder.counts(part)
    ones = F.one_hot(observed.long(), _VALUES).flatten(1).double()
    mean, variance = ones.mean(dim=0), ones.var(dim=0, correction=0)
    expected = F.relu((ones - mean) / (variance + 0.25).sqrt() @ encoder.vectors.weight)
    assert torch.allclose(encoder(observed[None])[0], expected, rtol=0, atol=1e-12)


def test_values_beyond_those_announced_count_as_the_largest() -> None:
    encoder = GridEncoder(_GRID, 8)
    largest, beyond = (torch.full((1, 1, _CELLS), value, dtype=torch.uint8) for value in (_VALUES - 1, 255))
    assert torch.equal(encoder(largest), encoder(beyond))
    assert torch.equal(encoder.counts(largest[0]), encoder.counts(beyond[0]))


@pytest.mark.parametrize("num_updates", [1, 3])
def test_training_counts_each_step_once(num_updates: int) -> None:
    """Steps of unrolls that have ended; those of unrolls that go on are counted when they end."""
    learner = small_learner()
    for _ in range(num_updates):
        learner.update()
    encoder = learner.agent.encoder.observation
    assert isinstance(encoder, GridEncoder)
    by_cell = encoder.seen.unflatten(0, (-1, encoder.num_values)).sum(dim=1)
    waiting = int(learner.actors.state.length.sum())
    assert set(by_cell.tolist()) == {learner.tokens_seen - waiting}


def test_images_are_seen_by_impalas_network() -> None:
    encoder = Encoder(Observation("image", (72, 96, 3)), num_actions=9, d_model=32)
    pixels = torch.randint(0, 256, (2, 3, 72, 96, 3), dtype=torch.uint8)
    out = encoder(pixels, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))
    assert out.shape == (2, 3, 32) and bool(out.isfinite().all())
    assert not torch.equal(out[0, 0], out[0, 1])
