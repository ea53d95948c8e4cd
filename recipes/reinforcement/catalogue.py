"""Which environment a configuration names, for any rows of it."""

from functools import partial
from typing import Any

import numpy as np

from recipes.reinforcement.environment import Environments
from recipes.reinforcement.object_matching import ObjectMatching, ObjectMatchingConfig
from recipes.reinforcement.recipes import GYMNASIUM
from waveform.runs.settings import typed


def make_environments(config: dict[str, Any], *, rows: np.ndarray) -> Environments:
    """rows: indices [N] over all processes, which with the seed decide what happens in them.

    Raises UserError for an environment that is unknown, not installed, or that agents cannot see or act in.
    """
    if config["recipe"] == GYMNASIUM:
        from recipes.reinforcement.environment_processes import EnvironmentProcesses
        from recipes.reinforcement.gymnasium_environments import GymnasiumEnvironments

        make = partial(
            GymnasiumEnvironments,
            config["env"],
            seed=config["seed"],
            options=config.get("env_options"),
            num_actions=config.get("env_actions"),
        )
        return EnvironmentProcesses(make, rows=rows) if config.get("env_processes") else make(rows=rows)
    task: ObjectMatchingConfig = typed(ObjectMatchingConfig, config["task"], section="task")
    return ObjectMatching(task, seed=config["seed"], rows=rows)
