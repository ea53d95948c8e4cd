"""An agent that learns: actors collect unrolls, their loss is computed, and one update follows.

    loss = sum over steps of -advantage log pi(a) + baseline_cost (v - V)^2 / 2 - entropy_cost H(pi)

divided by the steps of all processes (Espeholt et al. 2018, section 4.2; v and the advantage are V-trace's). Steps that
pad a short unroll take no part in this loss, and only whole windows take part in the compression loss.

It is to agents what engine/token_learner.py is to streams of tokens, and its steps count as tokens; the loop of both is
engine/trainer.py. Each process has its share of the environments, and gradients are summed, so the update does not
depend on how rows are dealt. Whatever actors keep has rows first and is part of the checkpoint, so a resumed run
continues bit for bit on a CPU.

Shape letters: U unrolls, T steps, A actions.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.reinforcement.actors import REWARD_CLIPPING, Actors, ActorState, Unrolls
from recipes.reinforcement.agent import Agent, AgentStep, GridEncoder, Inputs
from recipes.reinforcement.environment import Environments
from recipes.reinforcement.vtrace import vtrace
from waveform.engine.interface import State, map_state, optional_parts, take_rows
from waveform.engine.learner import Learner, clip
from waveform.engine.nonfinite import Diverged
from waveform.engine.train_config import BaseTrainConfig
from waveform.ranks.distributed import World
from waveform.system.rules import NOT_NEGATIVE, Rule, check_rules, one_of

_NotNegative = Annotated[float, NOT_NEGATIVE]


@dataclass
class LearnerConfig:
    """Fields of `learner`; the defaults are IMPALA's, with the entropy cost of Rae et al. 2019, section 5.7."""

    discount: Annotated[float, Rule(lambda value: 0 <= value <= 1, "it must be from 0 to 1")] = 0.99
    baseline_cost: _NotNegative = 0.5
    entropy_cost: _NotNegative = 2e-3
    reward_clipping: Annotated[str, one_of(*REWARD_CLIPPING)] = "abs_one"  # abs_one | soft_asymmetric | none
    clip_rho: _NotNegative = 1.0  # of V-trace's targets and of the policy's gradient
    clip_c: _NotNegative = 1.0

    def __post_init__(self) -> None:
        check_rules(self, section="learner")


class AgentLearner(Learner):
    """One agent in one kind of environment.

    Raises Diverged at a step whose loss or gradient is not finite, before the weights change.
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
        """Let the actors act for an unroll's steps, and learn from unrolls that ended; return this update's figures."""
        self.agent.eval()
        unrolls, counts = self.actors.collect(self.config.chunk)
        self.sums += counts.to(self.sums.device)
        self.tokens_seen += self.config.chunk * self.config.batch_size
        joined = map_state(lambda *tensors: torch.cat(tensors), *unrolls)
        figures = self.accumulate_gradients(joined)
        self.world.sum_gradients(self.agent.parameters())
        norms = clip(self.groups, self.config.clip_norm)
        figures |= {f"grad_norm_{name}": float(norm) for name, norm in norms.items()}
        if self.world.any(not all(map(math.isfinite, figures.values()))):
            bad = " and ".join(name for name, value in figures.items() if not math.isfinite(value))
            raise Diverged(
                f"{bad or 'a figure of another process'} is not finite at step {self.step}; training stopped. Lower "
                "train.lr or train.clip_norm in a new run"
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self._count_observed(joined)
        self.step += 1
        self._last = figures
        return figures

    def accumulate_gradients(self, unrolls: Unrolls) -> dict[str, float]:
        """Backpropagate the mean over all ranks' steps; return this rank's share of the losses."""
        self.agent.train()
        made = losses(self.agent, unrolls, self.settings, unroll_windows=self.config.unroll)
        counts = torch.tensor([int(unrolls.length.sum()), made.num_windows], dtype=torch.float64)
        num_steps, num_windows = self.world.sum_(counts.to(self.sums.device)).tolist()
        settings = self.settings
        loss = (made.policy + settings.baseline_cost * made.value - settings.entropy_cost * made.entropy) / num_steps
        compression = made.compression / max(num_windows, 1)
        (loss + self.config.aux_weight * compression).backward()
        shares = {"policy_loss": made.policy, "value_loss": made.value, "entropy": made.entropy}
        figures = {name: float(value.detach()) / num_steps for name, value in shares.items()}
        return figures | {"aux_loss": float(compression.detach())}

    def _count_observed(self, unrolls: Unrolls) -> None:
        """Tell the encoder what all ranks observed: after learning, which must read observations as the actors did."""
        encoder = self.agent.encoder.observation
        if isinstance(encoder, GridEncoder):
            took_place_UT = torch.arange(self.config.chunk) < unrolls.length[:, None]
            observed = unrolls.steps.inputs.observation[took_place_UT].to(self.world.device)
            encoder.seen += self.world.sum_(encoder.counts(observed))

    def _figures(self, *sums: float) -> tuple[dict[str, Any], str]:
        returns, episodes, successes, chances = sums
        last = torch.tensor(list(self._last.values()), dtype=torch.float64, device=self.sums.device)
        figures: dict[str, Any] = dict(zip(self._last, self.world.sum_(last).tolist(), strict=True))
        # A norm is the same on every rank.
        figures |= {name: value for name, value in self._last.items() if name.startswith("grad_norm")}
        figures |= {"episodes": int(episodes), **({"return_mean": returns / episodes} if episodes else {})}
        figures |= {"success": successes / chances} if chances else {}
        words = f"return {returns / episodes:.2f}, " if episodes else ""
        return figures, words + (f"{successes / chances:.1%} right, " if chances else "")


def own_rows(num_rows: int, *, rank: int, num_ranks: int) -> np.ndarray:
    """The indices of a process's rows among all."""
    each = num_rows // num_ranks
    return np.arange(rank * each, (rank + 1) * each)


class Losses(NamedTuple):
    """Sums over the steps of some unrolls."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    compression: Tensor  # over whole windows
    num_windows: int


def losses(agent: Agent, unrolls: Unrolls, config: LearnerConfig, *, unroll_windows: int = 1) -> Losses:
    """The losses of unrolls by the present agent; unroll_windows: windows through which gradients flow."""
    order = unrolls.length.argsort(descending=True, stable=True).tolist()
    unrolls = take_rows(unrolls, order)
    longest = int(unrolls.length[0])
    device = agent.value.weight.device
    inputs, action_UT, log_mu_UT, reward_UT = map_state(lambda tensor: tensor[:, :longest].to(device), unrolls.steps)
    read, num_windows = _read(agent, inputs, unrolls, unroll_windows=unroll_windows)
    steps_T, last_U1 = torch.arange(longest), (unrolls.length - 1)[:, None]
    took_place_UT = (steps_T <= last_U1).to(device)
    goes_on_UT = (steps_T < last_U1) | ((steps_T == last_U1) & ~unrolls.ended[:, None])
    log_pi_UTA = read.logits.log_softmax(dim=-1)
    log_pi_UT = log_pi_UTA.gather(2, action_UT[..., None])[..., 0]
    targets = vtrace(
        (log_pi_UT - log_mu_UT).detach(),
        reward_UT,
        config.discount * goes_on_UT.to(device, read.values.dtype),
        read.values.detach(),
        _bootstrap(agent, unrolls, read.state),
        clip_rho=config.clip_rho,
        clip_c=config.clip_c,
    )

    def total(values_UT: Tensor) -> Tensor:
        return torch.where(took_place_UT, values_UT, 0).sum()

    return Losses(
        policy=-total(log_pi_UT * targets.advantages),
        value=total((targets.values - read.values) ** 2) / 2,
        entropy=total(-(log_pi_UTA.exp() * log_pi_UTA).sum(dim=-1)),
        compression=read.aux_losses["compression"],
        num_windows=num_windows,
    )


def _read(agent: Agent, inputs: Inputs, unrolls: Unrolls, *, unroll_windows: int) -> tuple[AgentStep, int]:
    """Read unrolls, longest first, a window at a time; rows that have ended take no part in further windows.

    Returns what the agent makes of them, with the compression loss of all whole windows, and the number of these.
    """
    lengths = unrolls.length.tolist()
    longest = lengths[0]
    window = agent.window or longest
    state, parts = unrolls.start, optional_parts(agent.trunk)
    logits, values = [], []
    compression, num_windows = torch.zeros((), device=inputs.reward.device), 0
    for number, first in enumerate(range(0, longest, window)):
        last = min(first + window, longest)
        num_rows = sum(length > first for length in lengths)
        state = map_state(lambda tensor, n=num_rows: tensor[:n], state)
        parts.carry_gradient = (number + 1) % unroll_windows > 0 and last < longest
        step = agent(map_state(lambda tensor, n=num_rows, a=first, b=last: tensor[:n, a:b], inputs), state)
        state = step.state
        padding = (0, 0, 0, 0, 0, len(lengths) - num_rows)
        logits.append(F.pad(step.logits, padding))
        values.append(F.pad(step.values, padding[2:]))
        whole = sum(length >= first + window for length in lengths)
        compression = compression + sum(loss[:whole].sum() for loss in step.aux_losses.values())
        num_windows += whole
    parts.carry_gradient = False
    made = AgentStep(torch.cat(logits, dim=1), torch.cat(values, dim=1), state, {"compression": compression})
    return made, num_windows


@torch.no_grad()
def _bootstrap(agent: Agent, unrolls: Unrolls, state: State) -> Tensor:
    """The value [U] of what follows each unroll; 0 if its episode has ended.

    `state` is the one after the longest of them; one that goes on is as long as an unroll can be, so it is among these.
    """
    going_on = (~unrolls.ended).nonzero()[:, 0].tolist()
    bootstrap = torch.zeros(len(unrolls.ended), device=agent.value.weight.device)
    if going_on:
        following = map_state(lambda tensor: tensor[going_on].to(bootstrap.device), unrolls.following)
        bootstrap[going_on] = agent(following, take_rows(state, going_on)).values[:, 0].to(bootstrap.dtype)
    return bootstrap
