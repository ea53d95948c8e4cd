"""Builds the small agents and trainers of these tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.reinforcement.actors import Actors, Unrolls
from recipes.reinforcement.agent import Agent
from recipes.reinforcement.environment import Environments
from recipes.reinforcement.learner import AgentLearner, LearnerConfig, own_rows
from recipes.reinforcement.object_matching import ObjectMatching, ObjectMatchingConfig
from waveform.engine.interface import map_state
from waveform.engine.train_config import BaseTrainConfig
from waveform.engine.trainer import RunContext, Trainer
from waveform.ranks.distributed import World

_MODEL = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_feedforward": 16, "window": 4, "memory": 4}
MODELS: dict[str, dict[str, Any]] = {
    "compressive_transformer": {**_MODEL, "compressed": 4, "compression_rate": 2},
    "transformer_xl": _MODEL,
    "lstm": {"num_layers": 1, "d_model": 16},
}
UNROLL, EPISODE = 8, 13  # episodes end within unrolls, at different times in different rows
TASK = ObjectMatchingConfig(objects=3, delay=2, episode=EPISODE)


def check_restored(make: Callable[[], Environments], *, num_rows: int, num_steps: int, kept: int) -> Environments:
    """Check that an environment that is restored after `kept` steps goes on as the first one; return that."""
    first, second = make(), make()
    first.begin()
    actions = np.random.default_rng(0).integers(0, first.num_actions, (num_steps, num_rows))
    for a in actions[:kept]:
        first.step(a)
    second.restore([array.copy() for array in first.state()])
    for a in actions[kept:]:
        np.testing.assert_equal(second.step(a), first.step(a))
    return first


def small_agent(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Agent:
    torch.manual_seed(seed)
    environment = ObjectMatching(TASK, seed=0, rows=own_rows(1, rank=0, num_ranks=1))
    agent = Agent({"name": name, **MODELS[name]}, environment.observation, num_actions=4).to(dtype)
    with torch.no_grad():  # so that values, and what depends on the policy, are not all alike
        for parameter in agent.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return agent


def collected(agent: Agent) -> Unrolls:
    """Unrolls of several lengths, the first of episodes and later ones."""
    rows = own_rows(6, rank=0, num_ranks=1)
    environments = ObjectMatching(TASK, seed=4, rows=rows)
    actors = Actors(environments, agent, unroll=UNROLL, clipping="abs_one", seed=4, rows=rows)
    return map_state(lambda *tensors: torch.cat(tensors), *actors.collect(30)[0])


def small_learner(
    name: str = "compressive_transformer",
    *,
    world: World | None = None,
    dtype: torch.dtype = torch.float32,
    **train: Any,
) -> AgentLearner:
    world = world or World(show_progress=False)
    config = BaseTrainConfig(
        **{"max_steps": 6, "batch_size": 4, "chunk": UNROLL, "lr": 1e-2, "warmup_steps": 2, "log_every": 2,
           "checkpoint_every": 1000, "clip_norm": 1.0, "device": "cpu", **train}
    )  # fmt: skip
    rows = own_rows(config.batch_size, rank=world.rank, num_ranks=world.size)
    environments = ObjectMatching(TASK, seed=4, rows=rows)
    return AgentLearner(small_agent(name, dtype=dtype), environments, config, LearnerConfig(), seed=4, world=world)


def small_trainer(run_dir: Path, *, world: World | None = None, **options: Any) -> tuple[Trainer, AgentLearner]:
    """A trainer in `run_dir`, and its learner."""
    run_dir.mkdir(parents=True, exist_ok=True)
    learner = small_learner(world=world, **options)
    return Trainer(learner, RunContext(run_dir, learner.world)), learner
