"""The learner: unrolls of the actors become a loss, whose gradient improves policy, value and compressor.

    loss = sum over steps of -advantage log pi(a) + baseline_cost (v - V)^2 / 2 - entropy_cost H(pi)

divided by the steps of all processes (Espeholt et al. 2018, section 4.2; v and the advantage are V-trace's). Steps that
pad a short unroll take no part in it, and windows that padding ended none in the compression loss.

Shape letters: U unrolls, T steps, A actions.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.reinforcement.actors import REWARD_CLIPPING, Unrolls
from recipes.reinforcement.agent import Agent, AgentStep, Inputs
from recipes.reinforcement.vtrace import vtrace
from waveform.engine.interface import State, map_state, take_rows
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
    """Unrolls, longest first, read a window at a time; rows that have ended take no part in further ones.

    Returns what the agent makes of them, with the compression loss of all whole windows, and the number of these.
    """
    lengths = unrolls.length.tolist()
    longest = lengths[0]
    window = agent.window or longest
    state = unrolls.start
    logits, values = [], []
    compression, num_windows = torch.zeros((), device=inputs.reward.device), 0
    for number, first in enumerate(range(0, longest, window)):
        last = min(first + window, longest)
        num_rows = sum(length > first for length in lengths)
        state = map_state(lambda tensor, n=num_rows: tensor[:n], state)
        agent.parts.carry_gradient = (number + 1) % unroll_windows > 0 and last < longest
        step = agent(map_state(lambda tensor, n=num_rows, a=first, b=last: tensor[:n, a:b], inputs), state)
        state = step.state
        padding = (0, 0, 0, 0, 0, len(lengths) - num_rows)
        logits.append(F.pad(step.logits, padding))
        values.append(F.pad(step.values, padding[2:]))
        whole = sum(length >= first + window for length in lengths)
        compression = compression + sum(loss[:whole].sum() for loss in step.aux_losses.values())
        num_windows += whole
    agent.parts.carry_gradient = False
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
