"""An agent that learns: actors collect unrolls, and one update is made of them.

It is to agents what engine/token_learner.py is to streams of tokens, and its steps count as tokens; the loop of both is
engine/trainer.py. Each process has its share of the environments; losses are divided by the steps of all of them, and
gradients are summed, so the update does not depend on how rows are dealt. Whatever actors keep has rows first and is
part of the checkpoint, so a resumed run continues bit for bit on a CPU.
"""

import math
from typing import Any

import numpy as np
import torch

from recipes.reinforcement.actors import Actors, ActorState, Unrolls
from recipes.reinforcement.agent import Agent
from recipes.reinforcement.encoders import GridEncoder
from recipes.reinforcement.environment import Environments
from recipes.reinforcement.learner import LearnerConfig, losses
from waveform.engine.interface import map_state
from waveform.engine.learner import Learner, clip
from waveform.engine.nonfinite import Diverged
from waveform.engine.train_config import BaseTrainConfig
from waveform.ranks.distributed import World


class AgentLearner(Learner):
    """One agent in one kind of environment.

    Raises Diverged at a step whose loss or gradient is not finite, before anything of it is kept.
    """

    unit = "step"

    def __init__(
        self,
        agent: Agent,
        environments: Environments,
        config: BaseTrainConfig,
        settings: LearnerConfig,
        *,
        seed: int,
        world: World,
    ) -> None:
        """environments: this process's share of the train.batch_size rows."""
        self.agent, self.settings = agent, settings
        agent.to(world.device)
        world.broadcast_([*agent.parameters(), *agent.buffers()])
        self.actors = Actors(
            environments,
            agent,
            unroll=config.chunk,
            clipping=settings.reward_clipping,
            seed=seed,
            rows=own_rows(config.batch_size, rank=world.rank, num_ranks=world.size),
        )
        super().__init__(agent, agent.trunk, config, fresh=self.actors.state, world=world)
        self._last: dict[str, float] = {}  # this rank's share of the losses of the last update, and norms

    @property
    def state(self) -> ActorState:
        """What the actors keep; its tensors share no memory."""
        return map_state(torch.clone, self.actors.state)

    @state.setter
    def state(self, state: ActorState) -> None:
        self.actors.restore(state)

    def _update(self) -> dict[str, float]:
        """Let the actors act for an unroll's steps, and learn from what ended; returns the figures of this update."""
        self.agent.eval()
        unrolls, played = self.actors.collect(self.config.chunk)
        returns = [value for _, value in played.returns]
        counts = [sum(returns), len(returns), float(played.successes.sum()), float(played.chances.sum())]
        self.sums += torch.tensor(counts, dtype=torch.float64, device=self.sums.device)
        self.tokens_seen += self.config.chunk * self.config.batch_size
        joined = Unrolls.joined(unrolls)
        figures = self.accumulate_gradients(joined)
        self.world.sum_gradients(self.agent.parameters())
        norms = clip(self.groups, self.config.clip_norm)
        figures |= {f"grad_norm_{name}": float(norm) for name, norm in norms.items()}
        if self.world.any(not all(map(math.isfinite, figures.values()))):
            bad = " and ".join(name for name, value in figures.items() if not math.isfinite(value))
            raise Diverged(
                f"{bad or 'a figure of another process'} is not finite at step {self.step}; training stopped",
                remedy="Lower train.lr or train.clip_norm in a new run",
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self._count_observed(joined)
        self.step += 1
        self._last = figures
        return figures

    def accumulate_gradients(self, unrolls: Unrolls) -> dict[str, float]:
        """Backward of the mean over all ranks' steps; returns this rank's share of the losses."""
        self.agent.train()
        made = losses(self.agent, unrolls, self.settings, unroll_windows=self.config.unroll)
        counts = torch.tensor([int(unrolls.length.sum()), made.num_windows], dtype=torch.float64)
        num_steps, num_windows = self.world.sum_(counts.to(self.world.device)).tolist()
        settings = self.settings
        loss = (made.policy + settings.baseline_cost * made.value - settings.entropy_cost * made.entropy) / num_steps
        compression = made.compression / max(num_windows, 1)
        (loss + self.config.aux_weight * compression).backward()
        shares = {"policy_loss": made.policy, "value_loss": made.value, "entropy": made.entropy}
        figures = {name: float(value.detach()) / num_steps for name, value in shares.items()}
        return figures | {"aux_loss": float(compression.detach())}

    def _count_observed(self, unrolls: Unrolls) -> None:
        """Tell the encoder what all ranks observed; after learning, which then reads as the actors did."""
        encoder = self.agent.encoder.observation
        if isinstance(encoder, GridEncoder):
            took_place_UT = torch.arange(self.config.chunk) < unrolls.length[:, None]
            observed = unrolls.steps.inputs.observation[took_place_UT].to(self.world.device)
            encoder.seen += self.world.sum_(encoder.counts(observed))

    def _figures(self, *sums: float) -> tuple[dict[str, Any], str]:
        returns, episodes, successes, chances = sums
        last = torch.tensor(list(self._last.values()), dtype=torch.float64, device=self.world.device)
        figures: dict[str, Any] = dict(zip(self._last, self.world.sum_(last).tolist(), strict=True))
        # A norm is the same on every rank.
        figures |= {name: value for name, value in self._last.items() if name.startswith("grad_norm")}
        figures |= {"episodes": int(episodes)}
        figures |= {"return_mean": returns / episodes} if episodes else {}
        figures |= {"success": successes / chances} if chances else {}
        words = f"return {returns / episodes:.2f}, " if episodes else ""
        return figures, words + (f"{successes / chances:.1%} right, " if chances else "")


def own_rows(num_rows: int, *, rank: int, num_ranks: int) -> np.ndarray:
    """The indices of a process's rows among all."""
    each = num_rows // num_ranks
    return np.arange(rank * each, (rank + 1) * each)
