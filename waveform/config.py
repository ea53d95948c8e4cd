"""The configuration of a run on speech.

    config = { preset, seed, model: {name, ...}, data: {...}, train: {...} }

A preset is a YAML file `preset/NAME.yaml`, with what it sets for one model in `preset_model/NAME_MODEL.yaml`.
Packages that hold such files are found by the entry-point group `waveform.configs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from waveform.audio.corpus.prepare import DataConfig
from waveform.engine.train_config import Rule, TrainConfig
from waveform.runs.settings import ConfigFamily, compose_family

_MAX_SAMPLE_SECONDS = 600.0  # a listener's patience, while training waits


@dataclass
class SpeechTrainConfig(TrainConfig):
    """Fields of `train` for speech: those of every run, and what is heard of it."""

    sample_seconds: float = 1.0  # length of the TensorBoard sample at each evaluation; 0: none

    RULES: ClassVar[Mapping[str, Rule]] = {
        **TrainConfig.RULES,
        "sample_seconds": Rule(
            lambda value: 0 <= value <= _MAX_SAMPLE_SECONDS, f"it must be from 0 to {_MAX_SAMPLE_SECONDS:g}"
        ),
    }


_SPEECH = ConfigFamily(
    module="waveform.conf",
    root="config",
    command="waveform train ... --print-config",
    train=SpeechTrainConfig,
    groups={"data": ("audio", DataConfig)},
    plugins="waveform.configs",
)


def compose_config(overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> dict[str, Any]:
    """The resolved configuration as plain dicts. Raises UserError for an unknown key, choice or type."""
    return compose_family(_SPEECH, overrides, config_dir=config_dir)
