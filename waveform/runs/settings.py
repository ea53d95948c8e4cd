"""Composes a run's configuration: typed defaults, a preset, a user's folder, and `key=value` overrides, by Hydra.

Each family of runs (speech, text) has a root file, which names its groups. The groups `model` and `train`, and those
that a family adds, come from the dataclasses that document each field; the others are YAML files.
"""

import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from waveform.engine.train_config import TrainConfig
from waveform.models.registry import DECIDED_BY_DATA, model_class, model_names
from waveform.system.console import printable
from waveform.system.errors import UserError

STUDIES = "waveform.models.conf"  # package with the group `study` of every family: models as others had them
_LONGEST_MESSAGE = 1000  # characters
_LONGEST_LIST = 20  # of a value in a message
_KINDS = {  # OmegaConf's phrases about a value of the wrong type -> what to give
    "converted to Integer": "a whole number",
    "converted to Float": "a number",
    "not a valid bool": "true or false",
    "is not Optional": "a value that is not null",
}


@dataclasses.dataclass(frozen=True)
class ConfigFamily:
    """Where the configurations of one family of runs come from."""

    module: str  # the package that holds the root file and the groups' YAML files
    root: str  # the root file's name
    command: str  # what lists all settings, for a hint
    train: type[TrainConfig] = TrainConfig  # the fields of the group `train`
    groups: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)  # group -> (choice, dataclass)
    plugins: str | None = None  # entry-point group of further packages with YAML files
    chosen: tuple[str, ...] = ("preset", "study")  # groups of which a user names one choice


def _model_node(name: str) -> Any:
    """The typed config group of one model: its Config without what the data decides."""
    fields = [
        (field.name, field.type, dataclasses.field(default=field.default, default_factory=field.default_factory))
        for field in dataclasses.fields(model_class(name).Config)
        if field.name not in DECIDED_BY_DATA
    ]
    return dataclasses.make_dataclass("Model", [("name", str, dataclasses.field(default=name)), *fields])


def _register_groups(family: ConfigFamily) -> None:
    store = ConfigStore.instance()
    for name in model_names():
        try:
            store.store(group="model", name=name, node=_model_node(name))
        except Exception as error:  # a fault of another package must not affect the other models
            print(f"warning: the registered model {name!r} does not load: {error!r}", file=sys.stderr)
    store.store(group="train", name="default", node=family.train)
    for group, (choice, node) in family.groups.items():
        store.store(group=group, name=choice, node=node)


def _search_path(family: ConfigFamily, config_dir: Path | None) -> str:
    plugins = entry_points(group=family.plugins) if family.plugins else ()
    packages = [STUDIES, *(entry.value for entry in plugins if entry.value != family.module)]
    places = [f"pkg://{package}" for package in packages]
    if config_dir is not None:
        if not config_dir.is_dir():
            raise UserError(f"--config-dir {config_dir} is not a folder")
        places.append(f"file://{config_dir.absolute()}")
    quoted = ['"' + place.replace("\\", "\\\\").replace('"', '\\"') + '"' for place in places]
    return f"hydra.searchpath=[{','.join(quoted)}]"


def compose_family(
    family: ConfigFamily, overrides: Sequence[str] = (), *, config_dir: Path | None = None
) -> dict[str, Any]:
    """The resolved configuration as plain dicts. Raises UserError for an unknown key, choice or type."""
    for override in overrides:
        _check_override(override)
    _register_groups(family)
    try:
        with initialize_config_module(family.module, version_base="1.3"):
            composed = compose(family.root, overrides=[_search_path(family, config_dir), *overrides])
        content = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except Exception as error:  # Hydra and its grammar raise whatever they come across
        raise UserError(_shown(_explain(family, error, overrides, config_dir), _LONGEST_MESSAGE)) from error
    assert isinstance(content, dict)
    for section in ("model", "train", *family.groups):
        if not isinstance(content.get(section), dict):
            raise UserError(f"{_all(overrides)} removes {section!r}, which a run needs; give it a value")
    _check_added(family, overrides, config_dir)
    seed = content.get("seed")
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise UserError(f"seed is {_shown(repr(seed))}; it must be a whole number from 0 to {2**31 - 1}")
    if not isinstance(content.get("preset"), str):
        raise UserError("the chosen preset's file needs the lines '# @package _global_' and 'preset: ITS_NAME'")
    return {str(key): value for key, value in content.items()}


def _check_added(family: ConfigFamily, overrides: Sequence[str], config_dir: Path | None) -> None:
    """Raises UserError for a setting that Hydra's `+` would add, because nothing would read it."""
    added = [override for override in overrides if override.startswith("+")]
    if not added:
        return
    known = _names(compose_family(family, [o for o in overrides if o not in added], config_dir=config_dir))
    for override in added:
        key = override.lstrip("+").partition("=")[0]
        if key.count(".") < 2 and key not in known:  # deeper ones are refused by their dataclass
            raise UserError(f"unknown setting {_shown(key)!r}{_nearest(family, key, overrides, config_dir)}")


def _names(config: Mapping[str, Any]) -> set[str]:
    """Names of the settings of a configuration, like `train` and `train.lr`."""
    fields = {f"{group}.{name}" for group, value in config.items() if isinstance(value, dict) for name in value}
    return {*config, *fields}


def _check_override(override: str) -> None:
    """Raises UserError, naming it, for anything but a setting."""
    key, equals, _ = override.partition("=")
    if not equals:
        raise UserError(f"{_shown(repr(override))} is not a key=value setting; an example: train.max_steps=1000")
    if not override.isprintable():  # a terminal, a log or a YAML file would show something else
        raise UserError(f"{_shown(override)} contains a character that cannot be printed; leave it out")
    if key.lstrip("+~").startswith("hydra"):
        raise UserError(f"unknown setting {_shown(key)!r}: Hydra's own settings are not used here")
    if key.startswith("~"):
        raise UserError(f"{_shown(override)} would remove a setting, but a run needs them all; give it a value")
    try:
        OverridesParser.create().parse_override(override)
    except Exception as error:  # of Hydra's grammar, or of Python if brackets are nested too deeply
        reason = " ".join(str(error).split("See https")[0].split())
        raise UserError(f"{_shown(override)} is not a key=value setting ({_shown(reason)})") from error


def _shown(text: str, most: int = 200) -> str:
    """Text that fits on one line of a terminal."""
    text = printable(text)
    return text if len(text) <= most else f"{text[:most]}..."


def _all(overrides: Sequence[str]) -> str:
    return ", ".join(_shown(override) for override in overrides)


def _explain(family: ConfigFamily, error: Exception, overrides: Sequence[str], config_dir: Path | None) -> str:
    """One line of Hydra's several: which setting is wrong, and the nearest right one."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    text = " ".join(" ".join(str(cause) for cause in causes).split())
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if f"'{key}'" in text and ("not in" in text or "not found" in text):
            return f"unknown setting {key!r}{_nearest(family, key, overrides, config_dir)}"
        if f"{key}/{value}" in text and key in ("model", "train", *family.groups, *family.chosen):
            choices = _choices(family, key)
            if value in choices:
                missing = text.partition("Key '")[2].partition("'")[0]
                return f"{key}={value} sets {missing!r}, which this model does not have; choose another model"
            return f"unknown {key} {value!r}; choose one of {', '.join(choices)}"
    # If a key is given twice, the wrong value.
    for override in sorted(overrides, key=lambda override: repr(override.partition("=")[2]) not in text):
        key, _, value = override.lstrip("+~").partition("=")
        if f"full_key: {key}" in text or f"'{override}'" in text or repr(value) in text:
            reason = " ".join(str(causes[-1]).split("full_key")[0].split())
            kind = next((kind for phrase, kind in _KINDS.items() if phrase in reason), None)
            return f"{_shown(override)}: {reason}" if kind is None else f"{_shown(override)}: give {kind}"
    return f"{_all(overrides)}: {text}" if overrides else text


def _choices(family: ConfigFamily, group: str) -> list[str]:
    if group == "model":
        return model_names()
    if group == "train":
        return ["default"]
    if group in family.groups:
        return [family.groups[group][0]]
    folders = [Path(*import_module(module).__path__) / group for module in (family.module, STUDIES)]
    return sorted(path.stem for folder in folders for path in folder.glob("*.yaml"))


def _nearest(family: ConfigFamily, key: str, overrides: Sequence[str], config_dir: Path | None) -> str:
    """Advice: the nearest setting of what `overrides` choose (a model, a preset), or else how to list all."""
    chosen = [o for o in overrides if o.partition("=")[0] in {"model", "recipe", *family.chosen} - {key}]
    try:
        known = _names(compose_family(family, chosen, config_dir=config_dir))
    except UserError:  # a choice is wrong too, or a plug-in is broken
        return ""
    close = difflib.get_close_matches(key, sorted(known - {"model.name"}), n=1)  # `model` chooses it
    return f"; did you mean {close[0]!r}?" if close else f"; `{family.command}` lists all settings"


def typed(cls: Any, content: dict[str, Any], *, section: str) -> Any:
    """A dataclass instance from one section of a configuration, its types checked.

    Raises UserError naming the section, for a file that was edited by hand or written by another version.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), OmegaConf.create(content)))
    except OmegaConfBaseException as error:
        raise UserError(f"{section}: {' '.join(str(error).split('full_key')[0].split())}") from error


def to_yaml(config: dict[str, Any]) -> str:
    """The configuration as YAML text."""
    return OmegaConf.to_yaml(DictConfig(config))


def _short(value: Any) -> str:
    """A value in a message; of a list that is long, its beginning."""
    if isinstance(value, list) and len(value) > _LONGEST_LIST:
        return f"{value[:_LONGEST_LIST]} and {len(value) - _LONGEST_LIST} more"
    return repr(value)


def differing_keys(old: dict[str, Any], new: dict[str, Any], *, prefix: str = "") -> list[str]:
    """Dotted names of the settings in which two configurations differ, each with both values."""
    different = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            different += differing_keys(a, b, prefix=f"{prefix}{key}.")
        elif a != b:
            different.append(f"{prefix}{key} (was {_short(a)}, is {_short(b)})")
    return different
