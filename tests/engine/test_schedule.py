"""The learning rate over a run."""

import pytest

from waveform.engine.schedule import learning_rate


def test_learning_rate_can_change_in_mid_training() -> None:
    options = {"peak": 1e-3, "warmup_steps": 10, "decayed": 0.0}
    assert learning_rate(49, **options, change_at=50, after=1e-9) == pytest.approx(1e-3)
    assert learning_rate(50, **options, change_at=50, after=1e-9) == 1e-9
    assert learning_rate(5, **options, change_at=5, after=0.0) == 0.0
    assert learning_rate(10**6, **options) == pytest.approx(1e-3)
