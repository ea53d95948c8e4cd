"""The space that `tune` searches: settings and their values, read from YAML. The search itself is in waveform/tuning.

    train.lr: {low: 1e-3, high: 2e-2, log: true}   a range
    train.batch_size: [4, 8, 16]                   choices
    size:                                          named choices of settings that belong together
      small: {model.d_model: 64, model.num_heads: 4}
      wide: {model.d_model: 96, model.num_heads: 6}

The spaces of a package's models are in `spaces.yaml`, beside its presets: MODEL: {...}. A user's file may look so too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct
from omegaconf import OmegaConf

from waveform.models.registry import model_names
from waveform.system.errors import UserError

if TYPE_CHECKING:
    from optuna import Trial

_SIGNIFICANT_DIGITS = 3  # of a number drawn from a range
_UNITS_S = {"s": 1, "min": 60, "h": 3600}

Scalar = bool | int | float | str | None
Choices = dict[str, dict[str, Scalar]]  # name -> settings and their values
Drawn = Mapping[str, Any]  # dimension -> a number of its range, or the name of its choice


@dataclass(frozen=True)
class SearchConfig:
    """How long to search, and where."""

    budget: str = "10min"  # of training for each trial: a number of s, min or h
    trials: int = 20
    seed: int = 0  # of what is drawn from the space; that of the runs is the setting `seed`
    space: Path | None = None  # a YAML file; None: the one that comes with the model
    storage: str | None = None  # URL of a database that other machines share; None: a file in the folder

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UserError(f"--trials is {self.trials}; it must be at least 1")
        if self.budget_s <= 0:
            raise UserError(f"--budget {self.budget} leaves no time to train; give more")

    @property
    def budget_s(self) -> float:
        """Seconds of training for each trial."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", self.budget)
        if found is None:
            raise UserError(f"--budget {self.budget!r} is not a time; examples are 90s, 10min and 1.5h")
        return float(found[1]) * _UNITS_S[found[2]]


class Range(Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers from `low` to `high`, both included; whole ones if both are."""

    low: int | float
    high: int | float
    log: bool = False  # equal ratios are equally likely, instead of equal differences


@dataclass(frozen=True)
class Space:
    """What a search varies: each dimension is a range of one setting, or a choice of the values of one or several."""

    place: str  # the file that it comes from, for messages
    dimensions: Mapping[str, Range | Choices]

    def settings_of(self, dimension: str) -> set[str]:
        """Names of the settings to which a dimension gives values."""
        choices = self.dimensions[dimension]
        return {dimension} if isinstance(choices, Range) else {key for choice in choices.values() for key in choice}

    def without(self, settings: set[str]) -> "Space":
        """The space without the dimensions that give values to any of `settings`."""
        kept = [name for name in self.dimensions if not self.settings_of(name) & settings]
        return Space(self.place, {name: self.dimensions[name] for name in kept})

    def draw(self, trial: "Trial") -> dict[str, Any]:
        """Let Optuna draw from every dimension; what it has already drawn for this trial stays."""
        drawn: dict[str, Any] = {}
        for name, values in self.dimensions.items():
            if not isinstance(values, Range):
                drawn[name] = trial.suggest_categorical(name, list(values))
            elif isinstance(values.low, int) and isinstance(values.high, int):
                drawn[name] = trial.suggest_int(name, values.low, values.high, log=values.log)
            else:
                drawn[name] = trial.suggest_float(name, values.low, values.high, log=values.log)
        return drawn

    def overrides(self, drawn: Drawn) -> list[str]:
        """What was drawn, from all dimensions or some, as `key=value` settings."""
        settings: dict[str, Scalar] = {}
        for name, value in drawn.items():
            values = self.dimensions[name]
            if not isinstance(values, Range):
                settings |= values[value]
            else:
                settings[name] = value if isinstance(value, int) else float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]

    def drawn_by(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What has to be drawn to get a configuration, in the dimensions that contain its values."""
        drawn: dict[str, Any] = {}
        for name, values in self.dimensions.items():
            if not isinstance(values, Range):
                same = [label for label, choice in values.items() if all(_of(config, k) == choice[k] for k in choice)]
                if same:
                    drawn[name] = same[0]
            elif (value := _of(config, name)) is not None and values.low <= value <= values.high:
                drawn[name] = value
        return drawn

    def each_alone(self) -> list[dict[str, Any]]:
        """Every choice, and both ends of every range, of one dimension at a time."""
        return [
            {name: value}
            for name, values in self.dimensions.items()
            for value in ((values.low, values.high) if isinstance(values, Range) else values)
        ]


def _of(config: Mapping[str, Any], setting: str) -> Any:
    section, _, field = setting.partition(".")
    return config[section].get(field)


def short(dimension: str) -> str:
    return dimension.removeprefix("train.").removeprefix("model.")


def shown(drawn: Drawn) -> str:
    """What a trial drew, for a line or a table."""
    texts = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in drawn.items()}
    return ", ".join(f"{short(name)} {text}" for name, text in texts.items())


def space_of(model: str, *, packages: Sequence[str], file: Path | None = None) -> Space:
    """The search space of a YAML file, or the one that a package of configs brings for a model.

    packages: names, of which the first that has one counts. Raises UserError if none has, and for a file that cannot be
    read or is not a search space.
    """
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read --space {file}: {error}") from error
        if (found := _parse(text, str(file), model)) is None:
            raise UserError(f"{file} has no search space for model {model!r}")
        return found
    for package in packages:
        own = files(package).joinpath("spaces.yaml")
        if own.is_file() and (found := _parse(own.read_text(encoding="utf-8"), str(own), model)) is not None:
            return found
    raise UserError(f"model {model!r} comes without a search space; write one, and name it with --space FILE.yaml")


_Name = Annotated[str, Meta(min_length=1)]
_Named = Annotated[dict[_Name, dict[str, Scalar]], Meta(min_length=1)]
_FILE = dict[_Name, Annotated[list[Scalar], Meta(min_length=1)] | dict[str, Any]]


def _parse(text: str, place: str, model: str) -> Space | None:
    """The space of a file, or of its section for a model; None if it has sections for other models only."""
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        if isinstance(content, dict) and content.keys() & {model, *model_names()}:
            if model not in content:
                return None
            content = content[model]
        space = Space(place, {name: _dimension(name, value) for name, value in msgspec.convert(content, _FILE).items()})
        _check(space)
    except UserError:
        raise
    except Exception as error:  # whatever a YAML parser raises, and ours for what is not a space
        raise UserError(f"{place} is not a search space: {' '.join(str(error).replace('`$.', '`').split())}") from error
    return space


def _dimension(name: str, value: list[Scalar] | dict[str, Any]) -> Range | Choices:
    """Make a dimension of what the file says; choices of a single setting are named by their values."""
    if isinstance(value, list):
        return {each if isinstance(each, str) else json.dumps(each): {name: each} for each in value}
    if "low" in value or "high" in value:
        return msgspec.convert(value, Range)
    return msgspec.convert(value, _Named)


def _check(space: Space) -> None:
    """Raises ValueError for a range without numbers, and UserError for a setting that two dimensions give values to."""
    taken: dict[str, str] = {}
    for name, values in space.dimensions.items():
        if isinstance(values, Range) and not ((0 if values.log else -inf) < values.low < values.high < inf):
            raise ValueError(f"{name}: low must be below high, both finite, and above 0 if log is true")
        for setting in space.settings_of(name):
            if "." not in setting:
                raise ValueError(f"{setting} cannot be searched; settings have names such as train.lr")
            if setting in taken:
                raise ValueError(f"both {taken[setting]} and {name} give values to {setting}")
            taken[setting] = name
