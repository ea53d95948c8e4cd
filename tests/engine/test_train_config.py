"""The settings of `train`: each is checked, and each message names the field, its value and the remedy."""

import math
import re
from typing import Any, get_type_hints

import pytest

from waveform.engine.train_config import TrainConfig
from waveform.system.errors import UserError
from waveform.system.rules import rules_of

RULED = [name for name, kind in get_type_hints(TrainConfig, include_extras=True).items() if rules_of(kind)]
BAD: dict[str, Any] = {
    **dict.fromkeys(RULED, -1),
    "lr": math.inf,
    "clip_norm": math.nan,
    "timeout_s": 0,
    "beta2": 1.0,
    "precision": "fp64",
    "device": "tpu",
    "sharding": "ddp",
    "on_nonfinite": "ignore",
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
    with pytest.raises(UserError, match="choose cpu or cuda, or null for a GPU"):
        TrainConfig(device="tpu")


def test_training_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.max_steps and train\.max_seconds are both null"):
        TrainConfig(max_steps=None)
