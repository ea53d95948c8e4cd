"""Settings of agents: their configuration, composed as every run's is, and the environment that it names.

    config = { recipe, env, env_options, env_actions, env_processes, preset, seed,
               model: {name, ...}, train: {...}, learner: {...}, task: {...} }

`task` belongs to object matching; what begins with `env` belongs to the recipe `rl`.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from recipes.reinforcement import GYMNASIUM, OBJECT_MATCHING
from recipes.reinforcement.environment import Environments
from recipes.reinforcement.learner import LearnerConfig
from recipes.reinforcement.object_matching import ObjectMatching, ObjectMatchingConfig
from waveform.engine.train_config import BaseTrainConfig
from waveform.runs.folder import CONFIG_FILE
from waveform.runs.settings import ConfigFamily, compose_family, setting_of, typed
from waveform.system.errors import UserError

_AGENTS = ConfigFamily(
    module="recipes.reinforcement.conf",
    root="agent",
    train=BaseTrainConfig,
    command="python -m recipes train object_matching RUN_DIR --print-config",
    groups={"learner": {"default": LearnerConfig}, "task": {OBJECT_MATCHING: ObjectMatchingConfig}},
)
_OF_GYMNASIUM = ("env", "env_options", "env_actions", "env_processes")


class _Train(Struct):
    batch_size: Annotated[int, Meta(ge=1)]


class _Agent(Struct, tag_field="recipe"):
    """What commands rely on in an agent's config.yaml, which anyone may have edited."""

    seed: Annotated[int, Meta(ge=0, lt=1 << 31)]
    train: _Train
    learner: dict[str, Any]


class _Matching(_Agent, tag=OBJECT_MATCHING):
    task: dict[str, Any]


class _Gymnasium(_Agent, tag=GYMNASIUM):
    env: str
    env_options: dict[str, Any] | None = None
    env_actions: Annotated[int, Meta(ge=2)] | None = None
    env_processes: bool | None = None


def compose_config(
    recipe: str, overrides: Sequence[str] = (), *, config_dir: Path | str | None = None
) -> dict[str, Any]:
    """Return the resolved configuration as plain dicts. Raises UserError for an unknown key, choice or type."""
    other, others = (OBJECT_MATCHING, ("task",)) if recipe == GYMNASIUM else (GYMNASIUM, _OF_GYMNASIUM)
    for override in overrides:
        name = setting_of(override)
        if name.partition(".")[0] in others:
            raise UserError(f"{name} is a setting of the recipe {other}; leave it out, or train {other}")
    config = compose_family(_AGENTS, overrides, config_dir=config_dir)
    config = {"recipe": recipe, **{name: value for name, value in config.items() if name not in others}}
    if recipe == GYMNASIUM and config["env"] is None:
        raise UserError("the recipe rl needs an environment, for example env=MiniGrid-MemoryS7-v0")
    _check(config, what=f"settings of the recipe {recipe}")
    return config


def _check(config: dict[str, Any], *, what: str) -> None:
    try:
        msgspec.convert(config, _Matching | _Gymnasium)
    except msgspec.ValidationError as error:
        raise UserError(f"{what}: {str(error).replace('$.', '')}") from error


def environment_text(config: Mapping[str, Any]) -> str:
    """An agent's environment as the option `--env` names it: its name, and the options that it is made with."""
    name, options = str(config.get("env") or config["recipe"]), config.get("env_options")
    return f"{name} {json.dumps(options, default=str)}" if options else name


def check_agent(run_dir: Path | str, config: dict[str, Any], *, env: str | None) -> None:
    """Raises UserError if an agent's configuration is damaged, or could run code that the user has not named.

    A module runs when it is imported, and an option may name a program or a file. env: what the user named.
    """
    _check(config, what=f"{CONFIG_FILE} of {run_dir} is damaged")
    own = environment_text(config)
    if env is None and ":" in own:  # MODULE:NAME, or options
        raise UserError(
            f"{run_dir} needs an environment whose module or options could run any code; if you trust them, add "
            f"--env {shlex.quote(own)}"
        )
    if env not in (None, own):
        raise UserError(f"--env is {env}, but {run_dir} was trained in {own}; leave it out, or give --envs {env}")


def make_environments(config: dict[str, Any], *, rows: np.ndarray) -> Environments:
    """The environment that a configuration names, in `rows`, indices [N] over all processes.

    With the seed they decide what happens there. Raises UserError for an environment that is unknown, not installed, or
    that agents cannot see or act in.
    """
    if config["recipe"] == OBJECT_MATCHING:
        task = typed(ObjectMatchingConfig, config["task"], section="task")
        return ObjectMatching(task, seed=config["seed"], rows=rows)
    from recipes.reinforcement.environment_processes import EnvironmentProcesses
    from recipes.reinforcement.gymnasium_environments import GymnasiumEnvironments

    options, num_actions = config.get("env_options"), config.get("env_actions")
    make = partial(GymnasiumEnvironments, config["env"], seed=config["seed"], options=options, num_actions=num_actions)
    return EnvironmentProcesses(make, rows=rows) if config.get("env_processes") else make(rows=rows)
