"""Every number of every configuration is finite, and one that torch can count."""

import math
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import pytest

from recipes.corpora.catalogue import RECIPES
from recipes.reinforcement.learner import LearnerConfig
from recipes.reinforcement.object_matching import ObjectMatchingConfig
from tests.plugin_models import LSTM
from waveform.audio.audio_format import AudioFormat
from waveform.models import registry
from waveform.speech.config import SpeechTrainConfig
from waveform.system.errors import UserError
from waveform.system.rules import rules_of

CONFIGS = dict.fromkeys(
    [
        *(SpeechTrainConfig, AudioFormat, LearnerConfig, ObjectMatchingConfig),  # the first has those of `TrainConfig`
        *(recipe.settings for recipe in RECIPES.values()),
        *(registry.model_class(name).Config for name in registry.model_names()),
    ]
)
BAD = {int: (2**63, -(2**63), 10**400), float: (math.nan, math.inf, -math.inf, 1e30, -1e30)}


def refuses(make: Any, name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"\.{name} is ") as caught:
        make(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_number_is_one_that_a_machine_can_count(config: Any) -> None:
    needed = {field.name: 11 for field in fields(config) if field.default is field.default_factory is MISSING}
    for name, hint in get_type_hints(config).items():
        for kind in {int, float} & {hint, *get_args(hint)}:
            for value in BAD[kind]:
                refuses(lambda **given: config(**needed | given), name, value)


@pytest.mark.parametrize("config", CONFIGS)
def test_another_default_keeps_the_rules(config: Any) -> None:
    """A subclass that gives a field another default names its type again."""
    own, *bases = [get_type_hints(cls, include_extras=True) for cls in config.__mro__[:-1]]
    for base in bases:
        assert all(len(rules_of(own[name])) == len(rules_of(kind)) for name, kind in base.items())


def test_a_model_of_another_package_needs_no_rules_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "model_class", lambda name: LSTM)
    refuses(lambda **given: registry.build("lstm", vocab_size=11, **given), "d_model", 2**63)
