"""Composes a run's configuration with Hydra: typed defaults, a preset, a study, and `key=value` overrides.

Each family of runs (speech, text, agents) has a root file, which names its groups. The groups `model` and `train`, and
those that a family adds, come from the dataclasses that document each field. A preset is a YAML file, and so is a study
that a user writes; the studies of a package are in its studies.yaml. Presets and studies may have sections:

    train: {lr: 1e-3}                                       for every run
    models: {wavenet: {train: {lr: 2e-3}}}                  for one model
    recipes: {ptb: {train: {lr: 5e-4}, models: {...}}}      for one recipe, and for a recipe and a model

Each of these lines overrides those above it; a study overrides the preset, and `key=value` settings override both. What
a preset inherits from another one (Hydra's `defaults`) is in the same sections.
"""

import copy
import dataclasses
import difflib
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from waveform.engine.train_config import BaseTrainConfig, TrainConfig
from waveform.models.registry import DECIDED_BY_DATA, model_class, model_names
from waveform.system.console import printable
from waveform.system.errors import UserError
from waveform.system.plugins import entry_points

_MODELS = "waveform.models.conf"  # has studies for every family: models as others configured them
_SECTIONS = ("recipe", "preset", "preset_model", "study")  # groups whose settings are merged here, in this order
_OF_HYDRA = ("launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")  # its own groups
_LONGEST_MESSAGE = 1000  # characters
_LONGEST_LIST = 20  # entries of a list in a message
_KINDS = {  # OmegaConf's phrases about a value of the wrong type -> what to give
    "converted to Integer": "a whole number",
    "converted to Float": "a number",
    "not a valid bool": "true or false",
    "is not Optional": "a value that is not null",
}


@dataclasses.dataclass(frozen=True, eq=False)  # a key of the cache of `_by_hydra`, by identity
class ConfigFamily:
    """Where the configurations of one family of runs come from."""

    module: str  # the package that holds the root file, presets and studies
    root: str  # the root file's name
    command: str  # the command that lists all settings, for hints
    train: type[BaseTrainConfig] = TrainConfig  # the fields of the group `train`
    groups: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # group -> choice -> its settings
    plugins: str | None = None  # entry-point group of further packages with presets

    @property
    def packages(self) -> list[str]:
        """Names of the packages that bring presets and search spaces, its own first."""
        plugins = entry_points(group=self.plugins) if self.plugins else ()
        return list(dict.fromkeys([self.module, *(entry.value for entry in plugins)]))


def compose_family(
    family: ConfigFamily,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | str | None = None,
    any_model: bool = False,
) -> dict[str, Any]:
    """Compose a configuration, and return it, resolved, as plain dicts.

    any_model: the preset need not have sizes for the model. Raises UserError for an unknown key, choice or type, and
    for a preset that has sizes for other models only.
    """
    parsed = [_parsed(override) for override in overrides]
    groups = {"model", "train", "preset", "study", *family.groups}
    choices = [each for each in parsed if each.key_or_group in groups and not isinstance(each.value(), dict)]
    config, chosen = _composed(family, choices, config_dir)
    sections = {group: OmegaConf.to_container(config[group]) for group in _SECTIONS if group in chosen.keys() & config}
    config.update({group: chosen[group] for group in ("recipe", "preset") if group in sections})
    for group in ("preset_model", "study"):
        config.pop(group, None)
    if {"models", "recipes"} & config.keys():
        raise UserError(f"preset={chosen['preset']}: what it inherits is lost; remove '# @package _global_' from that")
    OmegaConf.set_struct(config, True)
    for group, section in sections.items():
        source = f"{group}={chosen[group]}"
        recipes = family.groups.get("recipe", {})
        for settings in _layers(section, source, model=chosen["model"], recipe=chosen.get("recipe"), recipes=recipes):
            _merge(family, config, settings, source=source)
    if not any_model:
        _require_sizes(family, sections["preset"], chosen)
    for override in parsed:
        if override not in choices:
            _apply(family, config, override)
    return _resolved(config, parsed)


def _parsed(text: str) -> Override:
    """Read a setting by Hydra's grammar. Raises UserError, which quotes the text, if it is not one."""
    key, equals, _ = text.partition("=")
    if not equals:
        raise UserError(f"{_shown(repr(text))} is not a key=value setting; an example: train.max_steps=1000")
    if not text.isprintable():  # a terminal, a log or a YAML file would show something else
        raise UserError(f"{_shown(text)} contains a character that cannot be printed; leave it out")
    if key.startswith("~"):
        raise UserError(f"{_shown(text)} would remove a setting, but a run needs them all; give it a value")
    try:
        override = OverridesParser.create().parse_override(text)
    except Exception as error:  # of Hydra's grammar, or of Python if brackets are nested too deeply
        reason = " ".join(str(error).split("See https")[0].split())
        raise UserError(f"{_shown(text)} is not a key=value setting ({_shown(reason)})") from error
    if override.package is not None:
        raise UserError(f"unknown setting {_shown(key)!r}; settings have no @")
    if override.is_sweep_override():
        raise UserError(f"{_shown(text)} has several values; give one, or a list in brackets")
    return override


def _composed(
    family: ConfigFamily, choices: Sequence[Override], config_dir: Path | str | None
) -> tuple[DictConfig, dict[str, str]]:
    """Let Hydra compose the choices, each preset and study in a section of its own; also return what is chosen."""
    given = [str(choice.input_line).lstrip("+") for choice in choices]
    for choice in choices:
        if not isinstance(choice.value(), str | int):
            raise UserError(f"{_shown(str(choice.input_line))}: give the name of a {choice.key_or_group}")
    unused = [f"~hydra/{group}" for group in _OF_HYDRA]  # reading them takes a fifth of the time
    overrides, models = (_search_path(family, config_dir), *unused, *given), tuple(model_names())
    by_hydra = _by_hydra if config_dir is None else _by_hydra.__wrapped__  # a user's own files may change
    try:
        return copy.deepcopy(by_hydra(family, overrides, models))
    except Exception as error:  # Hydra and its grammar raise errors of any type
        if isinstance(error, MissingConfigException) and error.options:
            group, _, name = str(error.missing_cfg_file).rpartition("/")
            raise UserError(f"unknown {group} {_shown(name)!r}; choose one of {', '.join(error.options)}") from error
        reason = " ".join(f"{error} {error.__cause__ or ''}".split("Config search path")[0].split())
        raise UserError(_shown(f"{', '.join(map(_shown, given))}: {reason}", _LONGEST_MESSAGE)) from error


@functools.lru_cache(maxsize=128)
def _by_hydra(
    family: ConfigFamily, overrides: tuple[str, ...], models: tuple[str, ...]
) -> tuple[DictConfig, dict[str, str]]:
    """Do the same, without a copy, once for each choice: it takes a tenth of a second. models: the registered ones."""
    _register(family, models)
    with initialize_config_module(family.module, version_base="1.3"):
        config = compose(family.root, overrides=list(overrides), return_hydra_config=True)
    OmegaConf.set_struct(config, False)
    return config, dict(config.pop("hydra").runtime.choices)


@functools.lru_cache(maxsize=1)  # the store holds the family that was registered last
def _register(family: ConfigFamily, models: Iterable[str]) -> None:
    """Put the groups of this family into Hydra's store, which all families share."""
    store = ConfigStore.instance()
    studies: dict[str, Any] = {}
    for module in (_MODELS, family.module):
        file = files(module).joinpath("studies.yaml")
        if file.is_file():
            studies |= dict(OmegaConf.create(file.read_text(encoding="utf-8")))
    for group, choices in {"study": studies, "train": {"default": family.train}, **family.groups}.items():
        store.repo.pop(group, None)
        for name, node in choices.items():
            store.store(group=group, name=name, node=node)
    for name in models:
        try:
            store.store(group="model", name=name, node=_model_node(name))
        except Exception as error:  # a fault of another package must not affect the other models
            print(f"warning: the registered model {name!r} does not load: {error!r}", file=sys.stderr)


def _model_node(name: str) -> Any:
    """The typed config group of one model: its Config without what the data decides."""
    config = model_class(name).Config
    types = get_type_hints(config, include_extras=True)  # resolved in the module whose names they use
    own = (field for field in dataclasses.fields(config) if field.name not in DECIDED_BY_DATA)
    fields = [(field.name, types[field.name], copy.copy(field)) for field in own]
    return dataclasses.make_dataclass("Model", [("name", str, dataclasses.field(default=name)), *fields])


def _search_path(family: ConfigFamily, config_dir: Path | str | None) -> str:
    places = [f"pkg://{package}" for package in family.packages[1:]]
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir {config_dir} is not a folder")
        places.append(f"file://{Path(config_dir).absolute()}")
    quoted = ['"' + place.replace("\\", "\\\\").replace('"', '\\"') + '"' for place in places]
    return f"hydra.searchpath=[{','.join(quoted)}]"


def _layers(
    section: Any, source: str, *, model: str, recipe: str | None, recipes: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Yield what a section sets for every run, then for this model, for this recipe, and for both.

    Raises UserError if it has settings for models or recipes that do not exist.
    """
    yield {name: value for name, value in section.items() if name not in ("models", "recipes")}
    for kind, chosen, known in (("models", model, model_names()), ("recipes", recipe, recipes)):
        parts = section.get(kind, {})
        if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
            raise UserError(
                f"{kind!r} of a preset or study needs settings by name, such as {chosen}: {{train: {{...}}}}"
            )
        for name in parts.keys() - {*known}:
            raise UserError(f"{source} has settings for {_shown(repr(name))}, which is not one of the {kind} here")
        if chosen in parts:
            yield from _layers(parts[chosen], source, model=model, recipe=recipe, recipes=recipes)


def _require_sizes(family: ConfigFamily, preset: Any, chosen: Mapping[str, str]) -> None:
    """Raises UserError if a preset has sizes for some models, or some recipes and models, but not for these."""
    model, recipe = chosen["model"], chosen.get("recipe")
    by_model = sorted(preset.get("models", {}))
    by_recipe = sorted(
        f"{name} with model={each}"
        for name, part in (preset.get("recipes", {}) if recipe else {}).items() for each in part.get("models", {})
    )  # fmt: skip
    wanted = f"{recipe} with model={model}" if recipe else f"model={model}"
    if not (by_model or by_recipe) or model in by_model or wanted in by_recipe:
        return
    presets = [yaml.safe_load(file.read_text()) for file in files(family.module).joinpath("preset").iterdir()]
    if by_model and not any(model in known.get("models", {}) for known in presets):
        return  # a model of another package, with sizes of its own
    some = ", ".join(by_model or by_recipe)
    raise UserError(f"preset={chosen['preset']} has no sizes for {wanted}; it has some for {some}")


def _merge(family: ConfigFamily, config: DictConfig, settings: dict[str, Any], *, source: str) -> None:
    """Merge a preset's or study's settings into a configuration. Raises UserError, naming one that does not fit."""
    for name, value in settings.items():
        if isinstance(config.get(name), DictConfig) and not isinstance(value, dict):
            raise UserError(f"{source}: {name} is {_shown(repr(value))}; it needs settings by name")
    try:
        config.merge_with(settings)
    except ConfigKeyError as error:
        key = str(error.full_key)
        raise UserError(f"{source} sets the unknown {key!r}{_nearest(family, key, config)}") from error
    except Exception as error:  # OmegaConf raises errors of any type
        raise UserError(f"{source}: {getattr(error, 'full_key', None)}: {_reason(error)}") from error


def _apply(family: ConfigFamily, config: DictConfig, override: Override) -> None:
    """Apply a user's setting to a configuration. Raises UserError, naming it, if it is unknown or does not fit."""
    text, key = str(override.input_line), override.key_or_group
    try:
        OmegaConf.update(config, key, override.value())
    except ValidationError as error:
        raise UserError(_shown(f"{_shown(text)}: {_reason(error)}", _LONGEST_MESSAGE)) from error
    except Exception as error:  # OmegaConf raises errors of any type on the way to a key
        raise UserError(f"unknown setting {_shown(key)!r}{_nearest(family, key, config)}") from error


def _resolved(config: DictConfig, overrides: Sequence[Override]) -> dict[str, Any]:
    """Return a configuration as plain dicts. Raises UserError if a value is missing or refers to a missing one."""
    texts = {override.key_or_group: _shown(str(override.input_line)) for override in overrides}
    try:
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except Exception as error:  # of OmegaConf and its resolvers
        key = getattr(error, "full_key", None)
        source = texts.get(str(key)) or ", ".join(texts.values()) or key
        raise UserError(_shown(f"{source}: {_reason(error)}", _LONGEST_MESSAGE)) from error
    assert isinstance(content, dict)
    seed = content.get("seed")
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise UserError(f"seed is {_shown(repr(seed))}; it must be a whole number from 0 to {2**31 - 1}")
    return {str(key): value for key, value in content.items()}


def _nearest(family: ConfigFamily, key: str, config: DictConfig) -> str:
    """Advise on an unknown setting: which models have it, what else it may mean, or else how to list all settings."""
    group, _, field = key.rpartition(".")
    models = sorted(ConfigStore.instance().repo["model"].items()) if group == "model" else []
    if names := [file.removesuffix(".yaml") for file, stored in models if field in stored.node]:
        return f" of {config.model.name}; it is a setting of {', '.join(names)}"
    content: Any = OmegaConf.to_container(config)
    groups = {group: fields for group, fields in content.items() if isinstance(fields, dict)}
    known = {*content, *(f"{group}.{name}" for group, fields in groups.items() for name in fields)}
    same = sorted(name for name in known if name.endswith(f".{key}"))  # `lr` for train.lr
    close = same or difflib.get_close_matches(key, sorted(known - {"model.name"}), n=1)  # `model` sets it
    return f"; did you mean {close[0]!r}?" if close else f"; `{family.command}` lists all settings"


def _reason(error: Exception) -> str:
    """Say what is wrong with a value, in OmegaConf's words, or what to give instead."""
    reason = " ".join(str(error).split("full_key")[0].split())
    kind = next((kind for phrase, kind in _KINDS.items() if phrase in reason), None)
    return reason if kind is None else f"give {kind}"


def _shown(text: str, most: int = 200) -> str:
    """Text that fits on one line of a terminal."""
    text = printable(text)
    return text if len(text) <= most else f"{text[:most]}..."


def setting_of(override: str) -> str:
    """The dotted name of the setting that an override gives, whether or not it begins with a +."""
    return override.lstrip("+").partition("=")[0]


def given_by(overrides: Iterable[str]) -> list[str]:
    """Dotted names of all settings that overrides give: for `train={lr: 1, beta2: 0.9}`, train.lr and train.beta2."""
    names: list[str] = []
    for override in overrides:
        name = setting_of(override)
        names += dict(leaves({name: _parsed(override).value()})) if "{" in override else [name]
    return names


def leaves(config: Mapping[Any, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of each setting."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, prefix=f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def typed(cls: Any, content: dict[str, Any], *, section: str) -> Any:
    """Make a dataclass instance from one section of a configuration, and check its types.

    Raises UserError naming the section, for a file that was edited by hand or written by another version.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), OmegaConf.create(content)))
    except OmegaConfBaseException as error:
        name = f"{section}.{error.full_key or ''}".rstrip(".")  # of a section within it, OmegaConf does not say which
        raise UserError(f"{name}: {_reason(error)}") from error


def to_yaml(config: dict[str, Any]) -> str:
    """The configuration as YAML text."""
    return OmegaConf.to_yaml(DictConfig(config))


def _short(value: Any) -> str:
    """Show a value in a message; of a long list, only the beginning."""
    if isinstance(value, list) and len(value) > _LONGEST_LIST:
        return f"{_short(value[:_LONGEST_LIST])} and {len(value) - _LONGEST_LIST} more"
    return json.dumps(value, ensure_ascii=False, default=repr)  # null and true rather than None and True


def differing_keys(old: dict[str, Any], new: dict[str, Any], *, prefix: str = "") -> list[str]:
    """List the settings in which two configurations differ, by their dotted names, each with both values.

    If a section, such as `model`, has a different `name`, only that is listed.
    """
    different = []
    for key in sorted({*old, *new}) if old.get("name") == new.get("name") else ["name"]:
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            different += differing_keys(a, b, prefix=f"{prefix}{key}.")
        elif a != b:
            different.append(f"{prefix}{key} (was {_short(a)}, is {_short(b)})")
    return different
