"""The learning rate over a run."""

import pytest

from waveform.engine.schedule import learning_rate


def test_learning_rate_can_change_in_mid_training() -> None:
    options = {"peak": 1e-3, "warmup_steps": 10, "decayed": 0.0}
    assert learning_rate(49, **options, change_at=50, after=1e-9) == pytest.approx(1e-3)
    assert learning_rate(50, **options, change_at=50, after=1e-9) == 1e-9
    assert learning_rate(5, **options, change_at=5, after=0.0) == 0.0
    assert learning_rate(10**6, **options) == pytest.approx(1e-3)


def test_a_floor_of_zero_is_transformer_xls_schedule() -> None:
    """By hand: linear from 0 to the peak, then 0.5 (1 + cos(pi x)) of it, to 0."""
    options = {"peak": 2.5e-4, "warmup_steps": 4, "floor": 0.0}
    assert [learning_rate(step, **options, decayed=0.0) for step in range(4)] == pytest.approx(
        [0.625e-4, 1.25e-4, 1.875e-4, 2.5e-4]
    )
    assert learning_rate(50, **options, decayed=0.5) == pytest.approx(1.25e-4)
    assert learning_rate(75, **options, decayed=0.75) == pytest.approx(2.5e-4 * 0.1464466)
    assert learning_rate(100, **options, decayed=1.0) == 0
