"""Actors: let an agent act in every row of an environment, and cut what happens into unrolls for the learner.

An unroll is up to T consecutive steps of one episode, from a multiple of T steps after its beginning on; it ends
early only with its episode. So a learner never has to reset a state within an unroll, and rows end their windows
together. With an unroll goes the state that the agent had at its start.

Shape letters: N rows of this process, T steps of an unroll, U unrolls.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipes.reinforcement.agent import Agent, Inputs
from recipes.reinforcement.environment import Environments, Outcome
from recipes.reinforcement.random_rows import RandomRows
from waveform.engine.interface import State, map_state, reset_rows, state_tensors, take_rows

_STREAM = 2  # of random numbers
REWARD_CLIPPING: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # what agents learn from, as in scalable_agent
    "abs_one": lambda rewards: rewards.clip(-1, 1),
    "soft_asymmetric": lambda rewards: 5 * np.where(rewards < 0, 0.3 * np.tanh(rewards / 5), np.tanh(rewards / 5)),
    "none": lambda rewards: rewards,
}


class Steps(NamedTuple):
    """What happened in unrolls; steps after an unroll's end hold what was there before."""

    inputs: Inputs  # each [U, T, ...]
    action: Tensor  # [U, T]
    log_mu: Tensor  # [U, T], log-probability of the action when it was drawn
    reward: Tensor  # [U, T], clipped


class Unrolls(NamedTuple):
    """Unrolls that have ended."""

    start: State  # the agent's, before the first step
    steps: Steps
    length: Tensor  # [U], steps that took place
    ended: Tensor  # [U] bool: the episode ended with the unroll
    following: Inputs  # [U, 1, ...], what the agent would have read next


class ActorState(NamedTuple):
    """Everything that actors keep, rows first, so that a checkpoint's rows can be dealt to other processes."""

    environment: tuple[Tensor, ...]
    present: Inputs  # [N, ...], what the agent reads next
    agent: State
    start: State  # the agent's at the start of the unroll that is being filled
    steps: Steps  # [N, T, ...]
    length: Tensor  # [N], steps of the unroll so far
    episode_return: Tensor  # [N] fp64, unclipped
    num_draws: Tensor  # [N]


class Actors:
    """N rows of an environment and the agent's state in each."""

    def __init__(
        self, environments: Environments, agent: Agent, *, unroll: int, clipping: str, seed: int, rows: np.ndarray
    ) -> None:
        """unroll: T; rows: indices [N] over all processes; the agent is the one that acts, on its own device."""
        self.environments, self.agent, self.unroll = environments, agent, unroll
        self._clipped = REWARD_CLIPPING[clipping]
        self._random = RandomRows(seed, stream=_STREAM, rows=rows)
        num_rows = len(rows)
        self.device = agent.value.weight.device
        self._fresh = agent.init_state(num_rows, device=self.device)
        self._no_action = torch.full((num_rows,), agent.num_actions)
        present = Inputs(torch.from_numpy(environments.begin()), self._no_action, torch.zeros(num_rows))

        def room(tensor: Tensor) -> Tensor:
            return tensor.new_zeros(num_rows, unroll, *tensor.shape[1:])

        self.state = ActorState(
            environment=_tensors(environments),
            present=present,
            agent=self._fresh,
            start=self._fresh,
            steps=Steps(Inputs(*map(room, present)), room(self._no_action), *(room(present.reward) for _ in range(2))),
            length=torch.zeros(num_rows, dtype=torch.int64),
            episode_return=torch.zeros(num_rows, dtype=torch.float64),
            num_draws=torch.zeros(num_rows, dtype=torch.int64),
        )

    def restore(self, state: ActorState) -> None:
        """Continue from a `state`."""
        self.state = state
        self.environments.restore([tensor.numpy() for tensor in state.environment])

    def collect(self, num_steps: int) -> tuple[list[Unrolls], Tensor]:
        """Take steps in every row; return the unrolls that ended, oldest first, and counts [4], fp64.

        The counts are the sum of the returns of episodes that ended, the number of these episodes, that of successes,
        and how often there could have been one.
        """
        unrolls: list[Unrolls] = []
        counts = torch.zeros(4, dtype=torch.float64)
        for _ in range(num_steps):
            outcome, returns = self.step(unrolls)
            counts += torch.tensor(
                [sum(returns.values()), len(returns), outcome.successes.sum(), outcome.chances.sum()]
            )
        self.state = self.state._replace(environment=_tensors(self.environments))
        return unrolls, counts

    def step(self, unrolls: list[Unrolls] | None = None) -> tuple[Outcome, dict[int, float]]:
        """Take one step in every row, and add the unrolls that end to `unrolls`, if given.

        Returns the outcome, and the unclipped returns of episodes that ended, by their row in this process. The state
        of the environments is only kept by `collect`.
        """
        state = self.state
        present, steps, length = state.present, state.steps, state.length
        start = reset_rows(state.start, state.agent, length == 0)
        action, log_mu, agent_state = self._act(present, state)
        outcome = self.environments.step(action.numpy())
        ended = torch.from_numpy(outcome.ended)
        reward = torch.from_numpy(self._clipped(outcome.reward).astype(np.float32))
        rows = torch.arange(len(length))
        for kept, new in zip(state_tensors(steps), (*present, action, log_mu, reward), strict=True):
            kept[rows, length] = new
        following = Inputs(torch.from_numpy(outcome.observation), action, reward)
        length = length + 1
        full = ended | (length == self.unroll)
        if unrolls is not None and full.any():
            every_row = Unrolls(start, steps, length, ended, map_state(lambda tensor: tensor[:, None], following))
            unrolls.append(take_rows(every_row, full.nonzero()[:, 0].tolist()))
        episode_return = state.episode_return + torch.from_numpy(outcome.reward)
        self.state = state._replace(
            present=following._replace(
                action=torch.where(ended, self._no_action, action), reward=torch.where(ended, 0, reward)
            ),
            agent=reset_rows(agent_state, self._fresh, ended),
            start=start,
            length=torch.where(full, 0, length),
            episode_return=torch.where(ended, 0, episode_return),
            num_draws=state.num_draws + 1,
        )
        return outcome, {row: float(episode_return[row]) for row in ended.nonzero()[:, 0].tolist()}

    @torch.no_grad()
    def _act(self, present: Inputs, state: ActorState) -> tuple[Tensor, Tensor, State]:
        """Draw an action for each row: [N], its log-probability [N], the agent's state after it."""
        inputs = Inputs(*(tensor[:, None].to(self.device) for tensor in present))
        logits, _, agent_state, _ = self.agent(inputs, state.agent)
        log_probabilities = logits[:, 0].float().log_softmax(dim=-1).cpu()
        uniform = torch.from_numpy(self._random.uniform(state.num_draws.numpy()))
        below = log_probabilities.double().exp().cumsum(dim=-1) <= uniform[:, None]
        action = below.sum(dim=-1).clamp(max=self.agent.num_actions - 1)
        return action, log_probabilities.gather(1, action[:, None])[:, 0], agent_state


def _tensors(environments: Environments) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array.copy()) for array in environments.state())
