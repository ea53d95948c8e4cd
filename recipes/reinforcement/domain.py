"""The domain of agents: their settings, and a trainer in a run folder (waveform/domain.py has the interface)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch

from recipes.reinforcement import RECIPES
from recipes.reinforcement.agent import Agent
from recipes.reinforcement.learner import AgentLearner, LearnerConfig, own_rows
from recipes.reinforcement.settings import compose_config, make_environments
from waveform.domain import Domain, TrainRequest
from waveform.engine.dataset import Dataset
from waveform.engine.streams import check_sizes
from waveform.engine.train_config import BaseTrainConfig
from waveform.engine.trainer import RunContext, Trainer
from waveform.runs.configured_model import num_parameters, window_of
from waveform.runs.folder import CONFIG_FILE, check_recorded, comparable
from waveform.runs.settings import to_yaml, typed
from waveform.runs.training import check_fits, claim
from waveform.system.atomic import write_file
from waveform.system.errors import UserError


class Agents(Domain):
    """Runs of agents."""

    kind = "environment"
    runs = "runs of agents"
    unit = "step"
    verbs: ClassVar[Mapping[str, str]] = {
        verb: f"recipes.reinforcement.evaluation:{verb}" for verb in ("evaluate", "compare")
    }
    train_config = BaseTrainConfig

    def knows(self, name: str) -> bool:
        return name in RECIPES

    def compose(self, request: TrainRequest) -> dict[str, Any]:
        if request.origin.run is not None:
            raise UserError("--from: an agent begins with weights of its own; leave it out")
        return compose_config(str(request.source), request.overrides, config_dir=request.config_dir)

    @contextmanager
    def open_training(
        self, data: Dataset | None, config: dict[str, Any], train_config: BaseTrainConfig, context: RunContext
    ) -> Iterator[Trainer]:
        """Claim the run folder of `context` for a trainer, new or resumed; `config` gains the section `dataset`."""
        run_dir, world, num_rows = context.run_dir, context.world, train_config.batch_size
        check_sizes(train_config, window=window_of(config), num_ranks=world.size)
        environments = make_environments(config, rows=own_rows(num_rows, rank=world.rank, num_ranks=world.size))
        # What the configuration of other runs says of data, this one says of the environment.
        modality = {"kind": self.kind, "recipe": config["recipe"]}
        dataset = {"path": "", "vocab_size": environments.num_actions, "modality": modality, "checksums": {}}
        config["dataset"] = dataset
        two_states = replace(train_config, batch_size=2 * num_rows)  # now, and at the start of the unroll
        check_fits(config, two_states, dataset=dataset, world=world)  # needs the number of actions
        settings: LearnerConfig = typed(LearnerConfig, config["learner"], section="learner")
        torch.manual_seed(config["seed"])
        agent = Agent(config["model"], environments.observation, num_actions=environments.num_actions)
        with claim(run_dir, config, world=world, timeout_s=train_config.timeout_s):
            learner = AgentLearner(agent, environments, train_config, settings, seed=config["seed"], world=world)
            trainer = Trainer(learner, replace(context, record=comparable(config)))
            if trainer.resumed_from is not None:
                check_recorded(run_dir, config, trainer.resumed_from)
            if world.is_first:  # now that every setting has been accepted
                write_file(run_dir / CONFIG_FILE, to_yaml(config).encode())
            world.say(
                f"training an agent with {config['model']['name']} ({num_parameters(agent):,} parameters, preset "
                f"{config['preset']}) in {num_rows} rows of {config.get('env') or config['recipe']}, "
                f"{world.size} x {world.device.type}, into {run_dir}"
            )
            yield trainer
