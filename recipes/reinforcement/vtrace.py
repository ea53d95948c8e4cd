"""V-trace (Espeholt et al. 2018, section 4.1): targets for the current policy from what an older one experienced.

    rho_t = min(rho, pi(a_t | x_t) / mu(a_t | x_t))        pi: the learner's policy, mu: the actors'
    c_t = min(c, pi / mu)
    delta_t = rho_t (r_t + gamma_t V(x_t+1) - V(x_t))
    v_t = V(x_t) + delta_t + gamma_t c_t (v_t+1 - V(x_t+1))
    advantage_t = rho_t (r_t + gamma_t v_t+1 - V(x_t))

With pi = mu the targets are the n-step returns of Bellman's equation. Shape letters: B rows, T steps.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """Targets, without gradient."""

    values: Tensor  # v [B, T], what the value function should learn
    advantages: Tensor  # [B, T], weights of the policy's gradient, already corrected by rho


@torch.no_grad()
def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    *,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> VTrace:
    """Return the targets of B rows of T steps, by the formulas above.

    log_ratios [B, T]: log pi(a) - log mu(a); discounts [B, T]: 0 at an episode's last step and after it. rewards
    [B, T] follow the actions, values [B, T] are V(x_t), bootstrap [B] is the value of what follows the last step. No
    target depends on steps after a discount of 0, so short rows may be padded with anything finite.
    """
    ratios_BT = log_ratios.exp()
    rhos_BT, cs_BT = ratios_BT.clamp(max=clip_rho), ratios_BT.clamp(max=clip_c)
    next_values_BT = torch.cat([values[:, 1:], bootstrap[:, None]], dim=1)
    deltas_BT = rhos_BT * (rewards + discounts * next_values_BT - values)
    excess_B, excesses = torch.zeros_like(bootstrap), []  # v - V
    for t in reversed(range(values.shape[1])):
        excess_B = deltas_BT[:, t] + discounts[:, t] * cs_BT[:, t] * excess_B
        excesses.append(excess_B)
    targets_BT = values + torch.stack(excesses[::-1], dim=1)
    next_targets_BT = torch.cat([targets_BT[:, 1:], bootstrap[:, None]], dim=1)
    return VTrace(targets_BT, rhos_BT * (rewards + discounts * next_targets_BT - values))
