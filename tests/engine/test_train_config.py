"""The settings of `train`: what is refused, and the learning rate and update period that follow, worked out by hand."""

import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tests.engine.training import MakeTokens, small_trainer
from waveform.engine.train_config import TrainConfig
from waveform.system.errors import UserError
from waveform.system.rules import rules_of

RULED = [name for name, kind in get_type_hints(TrainConfig, include_extras=True).items() if rules_of(kind)]
BAD: dict[str, Any] = {
    **dict.fromkeys(RULED, -1),
    **{"lr": math.inf, "clip_norm": math.nan, "timeout_s": 0, "beta2": 1.0},
    **{"precision": "fp64", "device": "tpu", "sharding": "ddp", "on_nonfinite": "ignore"},
}


@pytest.mark.parametrize("name", RULED)
def test_each_rule_refuses_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"train.{name} is {BAD[name]!r}; ")) as caught:
        TrainConfig(**{name: BAD[name]})
    assert "\n" not in str(caught.value)
    TrainConfig(**{name: getattr(TrainConfig(), name)})


def test_choices_are_named() -> None:
    with pytest.raises(UserError, match="choose auto, fp32 or bf16"):
        TrainConfig(precision="fp64")
    with pytest.raises(UserError, match="choose cpu, cuda or mps, or null for a CUDA GPU"):
        TrainConfig(device="tpu")


def test_training_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.max_steps and train\.max_seconds are both null"):
        TrainConfig(max_steps=None)


# Rae et al. 2019, section 5, of characters: 4,000 steps from 1e-6 to 3e-4, then 100,000 back; they are 2.99e-4 apart.
CHARACTERS = {
    0: 1.07475e-6,  # 1e-6 + 2.99e-4 / 4,000
    999: 7.575e-5,  # a quarter of the way up
    1_999: 1.505e-4,  # half
    3_999: 3e-4,
    4_000: 3e-4,
    29_000: 2.56212464e-4,  # 1e-6 + 2.99e-4 (1 + cos 45 degrees) / 2
    54_000: 1.505e-4,  # 90 degrees
    79_000: 4.47875364e-5,  # 135 degrees
    104_000: 1e-6,
    1_000_000: 1e-6,
}


@pytest.mark.parametrize(("step", "expected"), CHARACTERS.items())
def test_warm_up_and_cosine(step: int, expected: float) -> None:
    config = TrainConfig(lr=3e-4, warmup_steps=4_000, decay_steps=100_000, max_steps=104_000)
    assert config.learning_rate(step, seconds=0.0) == pytest.approx(expected, rel=1e-6)


def test_without_decay_steps_the_cosine_ends_with_the_run() -> None:
    by_steps = TrainConfig(warmup_steps=100, max_steps=300, max_seconds=50.0)
    assert [by_steps.decayed(step, seconds=7.0) for step in (100, 150, 300)] == [0.0, 0.25, 1.0]
    by_clock = TrainConfig(warmup_steps=100, max_steps=None, max_seconds=50.0)
    assert [by_clock.decayed(150, seconds=seconds) for seconds in (0.0, 20.0, 50.0)] == [0.0, 0.4, 1.0]


def test_a_small_peak_has_no_floor_above_it() -> None:
    config = TrainConfig(lr=5e-7, warmup_steps=10, max_steps=None, max_seconds=1.0)
    for step, seconds in ((0, 0.0), (3, 0.5), (9, 0.9), (100, 1.0)):  # by the clock, warm-up and decay can overlap
        assert config.learning_rate(step, seconds) == pytest.approx(5e-7)


def test_the_trainer_follows_it(token_set: MakeTokens, tmp_path: Path) -> None:
    """The rate of the last of 8 steps, 5/6 through the cosine: 1e-6 + 0.009999 (1 + cos 150 degrees) / 2."""
    trainer = small_trainer("transformer_xl", token_set([60] * 4), tmp_path, max_steps=8, lr=1e-2, warmup_steps=2)
    trainer.run()
    assert [group["lr"] for group in trainer.learner.optimiser.param_groups] == pytest.approx([6.70805994e-4], rel=1e-6)


def test_updates_become_rare() -> None:
    assert [TrainConfig().chunks_of_update(step) for step in (0, 59_999, 60_000, 10**6)] == [1, 1, 4, 4]


def test_learning_rate_can_change_in_mid_training() -> None:
    config = TrainConfig(lr=1e-3, warmup_steps=10, max_steps=10**9, lr_change_at=50, lr_after=1e-9)
    assert [config.learning_rate(step, 0.0) for step in (49, 50)] == [pytest.approx(1e-3), 1e-9]
    assert TrainConfig(lr_change_at=5).learning_rate(5, 0.0) == 0.0


def test_a_floor_of_zero_is_transformer_xls_schedule() -> None:
    """By hand: linear from 0 to the peak, then 0.5 (1 + cos(pi x)) of it, to 0."""
    config = TrainConfig(lr=2.5e-4, lr_floor=0.0, warmup_steps=4, decay_steps=100)
    rates = [config.learning_rate(step, 0.0) for step in (0, 1, 2, 3, 54, 79, 104)]
    assert rates == pytest.approx([0.625e-4, 1.25e-4, 1.875e-4, 2.5e-4, 1.25e-4, 2.5e-4 * 0.1464466, 0])
