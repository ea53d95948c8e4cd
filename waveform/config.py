"""The configuration of a run on speech.

    config = { preset, seed, model: {name, ...}, data: {...}, train: {...} }

A preset is a YAML file `preset/NAME.yaml`, with what it sets for one model in `preset_model/NAME_MODEL.yaml`.
Packages that hold such files are found by the entry-point group `waveform.configs`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waveform.audio.corpus.prepare import DataConfig
from waveform.runs.settings import ConfigFamily, compose_family

_SPEECH = ConfigFamily(
    module="waveform.conf",
    root="config",
    command="waveform train ... --print-config",
    groups={"data": ("audio", DataConfig)},
    plugins="waveform.configs",
)


def compose_config(overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> dict[str, Any]:
    """The resolved configuration as plain dicts. Raises UserError for an unknown key, choice or type."""
    return compose_family(_SPEECH, overrides, config_dir=config_dir)
