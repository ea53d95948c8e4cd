"""Actors and learner: the learner reads what actors acted by, and padding changes nothing."""

import math

import numpy as np
import pytest
import torch

from recipes.reinforcement.actors import REWARD_CLIPPING, Unrolls
from recipes.reinforcement.agent import Agent, Inputs
from recipes.reinforcement.learner import LearnerConfig, losses
from recipes.reinforcement.vtrace import vtrace
from tests.recipes.reinforcement.small import EPISODE, MODELS, UNROLL, collected, small_agent, small_learner
from waveform.engine.interface import map_state, optional_parts, state_tensors, take_rows

_CONFIG = LearnerConfig()


@pytest.mark.parametrize(
    ("how", "learned"),
    [
        ("abs_one", [-1, -0.5, 0, 1]),
        ("soft_asymmetric", [-1.5 * math.tanh(4), -1.5 * math.tanh(0.1), 0, 5 * math.tanh(0.4)]),
        ("none", [-20, -0.5, 0, 2]),
    ],
)
def test_rewards_are_clipped_as_in_scalable_agent(how: str, learned: list[float]) -> None:
    np.testing.assert_allclose(REWARD_CLIPPING[how](np.array([-20, -0.5, 0, 2])), learned, rtol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_learner_sees_what_the_actor_saw(name: str) -> None:
    """By the states at their starts, unrolls read alone, a step at a time, give the probabilities of their actions."""
    agent = small_agent(name).eval()
    unrolls = collected(agent)
    assert set(unrolls.length.tolist()) == {UNROLL, EPISODE - UNROLL}
    for row, length in enumerate(unrolls.length.tolist()):
        state = take_rows(unrolls.start, [row])
        for t in range(length):
            inputs = map_state(lambda tensor, r=row, t=t: tensor[r : r + 1, t : t + 1], unrolls.steps.inputs)
            logits, _, state, _ = agent(inputs, state)
            log_pi = logits[0, 0].log_softmax(dim=-1)[unrolls.steps.action[row, t]]
            assert log_pi.item() == pytest.approx(unrolls.steps.log_mu[row, t].item(), rel=0, abs=1e-6)  # kept in fp32


def test_an_episode_begins_with_a_fresh_state_no_action_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARD_CLIPPING, "abs_one", lambda rewards: rewards + 9)  # every step has one
    agent = small_agent("compressive_transformer").eval()
    unrolls = collected(agent)
    fresh = state_tensors(agent.init_state(1, device="cpu"))
    first = unrolls.steps.inputs.action[:, 0] == agent.num_actions
    assert 0 < int(first.sum()) < len(first)
    assert torch.equal(unrolls.steps.inputs.reward[:, 0] == 0, first)
    for row, begins in enumerate(first.tolist()):
        start = state_tensors(take_rows(unrolls.start, [row]))
        assert all(torch.equal(a, b) for a, b in zip(start, fresh, strict=True)) == begins


def test_returns_are_of_rewards_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARD_CLIPPING, "abs_one", lambda rewards: rewards + 9)
    _, counts = small_learner().actors.collect(EPISODE)
    assert counts[0] < 9 and counts[1] == 4


def gradients(agent: Agent, unrolls: Unrolls) -> dict[str, torch.Tensor]:
    """Of the losses of all unrolls, the compression loss included."""
    made = losses(agent, unrolls, _CONFIG)
    agent.zero_grad()
    (made.policy + made.value / 2 - made.entropy / 100 + made.compression).backward()
    return {name: p.grad.clone() for name, p in agent.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_padding_takes_part_in_no_loss(name: str) -> None:
    """A batch has the gradient of its unrolls one by one; what stands in the padding does not matter."""
    agent = small_agent(name).train()
    unrolls = collected(agent.eval())
    together = gradients(agent, unrolls)
    if name == "compressive_transformer":
        assert any("compressor" in parameter for parameter in together)
    padding = torch.arange(UNROLL) >= unrolls.length[:, None]
    assert padding.any()
    observation, action, reward = unrolls.steps.inputs
    junk = unrolls.steps._replace(
        inputs=Inputs(observation.masked_fill(padding[..., None], 3), action.masked_fill(padding, 2), reward + padding),
        reward=unrolls.steps.reward - 5 * padding,
        log_mu=unrolls.steps.log_mu - 3 * padding,
    )
    torch.testing.assert_close(gradients(agent, unrolls._replace(steps=junk)), together, rtol=0, atol=1e-12)
    alone = [gradients(agent, take_rows(unrolls, [row])) for row in range(len(unrolls.length))]
    summed = {parameter: sum(each[parameter] for each in alone if parameter in each) for parameter in together}
    torch.testing.assert_close(summed, together, rtol=1e-9, atol=1e-10)


def test_the_task_never_reaches_the_compressor_nor_compression_the_rest() -> None:
    agent = small_agent("compressive_transformer").train()
    made = losses(agent, collected(agent), _CONFIG)
    compressor = {id(parameter) for parameter in optional_parts(agent.trunk).compressor_parameters()}
    made.compression.backward(retain_graph=True)
    reached = {id(p) for p in agent.parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached and reached <= compressor
    agent.zero_grad()
    (made.policy + made.value - made.entropy).backward()
    reached = {id(p) for p in agent.parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {id(p) for p in agent.parameters()} - compressor == reached  # nothing is left untrained


def test_losses_are_those_of_the_paper() -> None:
    """From probabilities and values that are read alone, by the formulas."""
    agent = small_agent("transformer_xl").eval()
    unrolls = collected(agent)
    learner = small_agent("transformer_xl", seed=1).train()  # actors lag behind it
    made = losses(learner, unrolls, LearnerConfig(discount=0.8))
    policy = value = entropy = 0.0
    with torch.no_grad():
        for row, length in enumerate(unrolls.length.tolist()):
            inputs = map_state(lambda tensor, r=row, n=length: tensor[r : r + 1, :n], unrolls.steps.inputs)
            step = learner(inputs, take_rows(unrolls.start, [row]))
            following = map_state(lambda tensor, r=row: tensor[r : r + 1], unrolls.following)
            bootstrap = learner(following, step.state).values[:, 0] * ~unrolls.ended[row]
            log_p = step.logits.log_softmax(dim=-1)
            chosen = log_p[0].gather(1, unrolls.steps.action[row, :length, None])[:, 0]
            discounts = torch.full((1, length), 0.8, dtype=torch.float64)
            discounts[0, -1] *= ~unrolls.ended[row]
            ratios = (chosen - unrolls.steps.log_mu[row, :length])[None]
            targets = vtrace(ratios, unrolls.steps.reward[row : row + 1, :length], discounts, step.values, bootstrap)
            policy -= float((chosen * targets.advantages[0]).sum())
            value += float(((targets.values - step.values) ** 2).sum()) / 2
            entropy -= float((log_p.exp() * log_p).sum())
    found = [loss.item() for loss in (made.policy, made.value, made.entropy)]
    assert found == pytest.approx([policy, value, entropy], rel=0, abs=1e-6)


def test_an_update_follows_the_mean_over_steps_and_over_whole_windows() -> None:
    """Each loss with its cost: minus sign and all."""
    learner = small_learner(dtype=torch.float64, aux_weight=3.0)
    unrolls = collected(learner.agent.eval())
    learner.settings = LearnerConfig(baseline_cost=0.3, entropy_cost=0.7)
    figures = learner.accumulate_gradients(unrolls)
    found = [p.grad.clone() for p in learner.agent.parameters()]
    learner.agent.zero_grad()
    made, num_steps = losses(learner.agent, unrolls, learner.settings), int(unrolls.length.sum())
    num_windows = int((unrolls.length // MODELS["compressive_transformer"]["window"]).sum())
    task = made.policy + 0.3 * made.value - 0.7 * made.entropy
    (task / num_steps + 3.0 * made.compression / num_windows).backward()
    torch.testing.assert_close(found, [p.grad for p in learner.agent.parameters()])
    assert figures["entropy"] == pytest.approx(made.entropy.item() / num_steps)


@pytest.mark.parametrize("num_windows", [1, 2])
def test_gradients_flow_through_as_many_windows_as_asked(num_windows: int) -> None:
    agent = small_agent("transformer_xl").train()
    unrolls = collected(agent)
    whole = take_rows(unrolls, (unrolls.length == UNROLL).nonzero()[:, 0].tolist())
    found = losses(agent, whole, _CONFIG, unroll_windows=num_windows).entropy
    expected, state = 0.0, whole.start
    agent.trunk.carry_gradient = num_windows == 2
    for part in (slice(0, 4), slice(4, 8)):
        logits, _, state, _ = agent(map_state(lambda tensor, part=part: tensor[:, part], whole.steps.inputs), state)
        expected = expected - (logits.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum()
    reached = [torch.autograd.grad(x, list(agent.parameters()), allow_unused=True) for x in (found, expected)]
    torch.testing.assert_close(*reached)
