"""The settings of runs on speech.

    config = { preset, seed, model: {name, ...}, data: {...}, train: {...} }

A preset is a YAML file `preset/NAME.yaml`; its section `models` has what it sets for single models. Whoever adds models
brings presets, additions to other presets (`preset_model/PRESET_MODEL.yaml`) and search spaces (`spaces.yaml`) in a
package that the entry-point group `waveform.configs` names.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from waveform.audio.corpus.prepare import DataConfig
from waveform.engine.train_config import TrainConfig
from waveform.runs.settings import ConfigFamily, compose_family
from waveform.system.rules import Rule

_SAMPLE_SECONDS = Rule(lambda value: 0 <= value <= 600, "it must be from 0 to 600")  # training waits for the sample


@dataclass
class SpeechTrainConfig(TrainConfig):
    """Fields of `train` for speech: those of every run, plus the length of audio samples."""

    # Length of the TensorBoard sample at each evaluation; 0: none
    sample_seconds: Annotated[float, _SAMPLE_SECONDS] = 1.0


SPEECH = ConfigFamily(
    module="waveform.conf",
    root="config",
    command="waveform train ... --print-config",
    train=SpeechTrainConfig,
    groups={"data": {"audio": DataConfig}},
    plugins="waveform.configs",
)
compose_config = partial(compose_family, SPEECH)  # the configuration of a run on speech that begins from scratch
