"""Says where each setting of a run's configuration is from, as the comments in recipes/conf have it.

A comment behind a value is its source; values without one are from what the first comment of their file names. Files
that name nothing, and settings that a user or no file has set, have no source.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from waveform.runs.settings import STUDIES

# In the order in which text.yaml puts them over each other.
_FILES = (
    "preset/{preset}",
    "preset_model/{preset}_{model}",
    "recipe_preset/{recipe}_{preset}",
    "recipe_preset_model/{recipe}_{preset}_{model}",
    "study/{study}",
    "study_model/{study}_{model}",
)
_PLACE = r"(section|Tables?|Figures?|appendix|public script) [\w.]*\w((,| and| to) \d+)*"
_HEADING = re.compile(rf"From no paper|Ours|[A-Z]\w+ et al\. \d{{4}}(, {_PLACE})?")
_SETTING = re.compile(r"^  (?P<name>\w+):[^#]*?(\s# (?P<source>.*))?$")


def sources(config: Mapping[str, Any], *, study: str = "none") -> dict[str, str]:
    """Return the source of each setting that has one, by names such as `train.lr`.

    config: as `compose_config` returns it, with the study that was chosen.
    """
    folders = [Path(*import_module(module).__path__) for module in ("recipes.conf", STUDIES)]
    names = {**config, "model": config["model"]["name"], "study": study}
    found: dict[str, tuple[Any, str]] = {}
    for pattern in _FILES:
        for folder in folders:
            for each in _with_defaults(folder / f"{pattern.format(**names)}.yaml", root=folder):
                found.update(_settings(each))
    return {name: source for name, (value, source) in found.items() if source and _is_set_to(config, name, value)}


def annotated(yaml: str, config: Mapping[str, Any], *, study: str = "none") -> str:
    """Return the YAML of a configuration with the source of each setting as a comment behind it."""
    known, section, lines = sources(config, study=study), "", []
    for line in yaml.splitlines():
        if line and not line.startswith((" ", "-")):
            section = line.partition(":")[0]
        name = f"{section}.{line.strip().partition(':')[0]}"
        is_setting = line.startswith("  ") and not line.startswith(("   ", "  -"))
        lines.append(f"{line}  # {known[name]}" if is_setting and name in known else line)
    return "\n".join(lines) + "\n"


def _with_defaults(path: Path, *, root: Path) -> Iterator[Path]:
    """A file and those that its defaults list names, in the order in which Hydra puts them over each other."""
    if not path.exists():
        return
    for entry in _content(path).get("defaults", ["_self_"]):
        if entry == "_self_":
            yield path
        else:
            other = root / f"{entry[1:]}.yaml" if entry.startswith("/") else path.parent / f"{entry}.yaml"
            yield from _with_defaults(other, root=root)


def _settings(path: Path) -> dict[str, tuple[Any, str]]:
    """Setting -> its value in a file, and its source ("" if none)."""
    lines, content = path.read_text().splitlines(), _content(path)
    comments = [line.removeprefix("# ") for line in lines if line.startswith("#") and "@package" not in line]
    heading = _HEADING.search(" ".join(comments))
    section, found = "", {}
    for line in lines:
        if line and line[0] not in " #":
            section = line.partition(":")[0]
        elif setting := _SETTING.match(line):
            source = setting["source"] or (heading[0] if heading else "")
            found[f"{section}.{setting['name']}"] = (content[section][setting["name"]], source)
    return found


def _content(path: Path) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(path))
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def _is_set_to(config: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a setting still has the value of the file, which an override may have replaced."""
    section, _, key = name.partition(".")
    refers = isinstance(value, str) and value.startswith("${")
    return refers or bool(config.get(section, {}).get(key) == value)
