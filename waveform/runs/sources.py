"""Says which paper or script each setting of a run's configuration comes from, by the table in sources.yaml."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from waveform.runs.settings import leaves, setting_of, to_yaml

_HEADING = "# Comments say where a value comes from; one without a comment is ours, or yours.\n"


def sources(config: Mapping[str, Any], *, domain: str, study: str = "none") -> dict[str, str]:
    """The source of each setting that has one and still has its value from there, by names such as `train.lr`.

    config: as `compose_config` returns it; domain: `audio`, or the recipe.
    """
    stated = stated_values(f"{domain}/{config['preset']}/{config['model']['name']}/{study}")
    values = dict(leaves(config))
    return {name: source for name, (value, source) in stated.items() if name in values and values[name] == value}


def stated_values(run: str) -> dict[str, tuple[Any, str]]:
    """Setting -> value and source, for a run named DOMAIN/PRESET/MODEL/STUDY."""
    stated: dict[str, tuple[Any, str]] = {}
    for patterns, by_source in source_table().items():
        if any(fnmatch(run, each if each.count("/") == 3 else f"{each}/*") for each in patterns.split(", ")):
            for source, values in by_source.items():
                stated |= {name: (value, source) for name, value in values.items()}
    return stated


@cache
def source_table() -> dict[str, dict[str, dict[str, Any]]]:
    """Runs -> source -> setting -> value, as sources.yaml has it."""
    text = files("waveform.runs").joinpath("sources.yaml").read_text()
    table: Any = OmegaConf.to_container(OmegaConf.create(text))
    return table


def annotated(config: dict[str, Any], *, domain: str, overrides: Sequence[str] = ()) -> str:
    """The YAML of a configuration with the source of each setting in a comment; overrides: may name its study."""
    studies = [override.partition("=")[2] for override in overrides if setting_of(override) == "study"]
    known = sources(config, domain=domain, study=studies[-1] if studies else "none")
    section, lines = "", []
    for line in to_yaml(config).splitlines():
        if line and not line.startswith((" ", "-")):
            section = line.partition(":")[0]
        name = f"{section}.{line.strip().partition(':')[0]}"
        is_setting = line.startswith("  ") and not line.startswith(("   ", "  -"))
        lines.append(f"{line}  # {known[name]}" if is_setting and name in known else line)
    return (_HEADING if known else "") + "\n".join(lines) + "\n"
