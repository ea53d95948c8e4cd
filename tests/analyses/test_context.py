"""Effective context: a group of models whose losses are known, and losses with limited context of real models."""

import numpy as np
import pytest
import torch

from tests import laws
from tests.analyses.conftest import nll_of, run_of
from tests.engine.training import MakeTokens
from waveform.analyses.context import ContextGrid, context_grid, effective_context, losses_by_context, relative_gain
from waveform.analyses.state_reuse import state_reuse_speed
from waveform.engine.interface import optional_parts
from waveform.models.registry import build
from waveform.system.progress import Progress

PROGRESS = Progress("contexts", total=None, unit="token", enabled=False)
CPU = torch.device("cpu")


def test_a_model_gains_until_its_reach() -> None:
    """Each step of context within its reach takes a tenth of the perplexity; nothing beyond."""
    lengths = [10 * (j + 1) for j in range(8)]
    losses = np.zeros((3, 8, 50))
    for model, reach in enumerate((20, 50, 1000)):
        losses[model] = 3.0 + np.array([np.log(0.9) * min(c, reach) / 10 for c in lengths])[:, None]
    for ratio in (0.1, 1.0):
        short, middle, long = effective_context(losses, lengths, ratio=ratio)
        assert (short["recl"], short["reached_limit"]) == (20, False)
        assert (middle["recl"], middle["reached_limit"]) == (50, False)
        assert (long["recl"], long["reached_limit"]) == (80, True)
        assert long["gains"] == pytest.approx([0.1] * 7)
        assert middle["gains"] == pytest.approx([0.1] * 4 + [0.0] * 3)


def test_gain_is_relative_to_the_groups_best() -> None:
    """By hand: improving on its own bad short-context losses gains a model nothing; only the group's best counts."""
    losses = np.zeros((2, 2, 4))
    losses[0] = [[1.0, 2.0, 3.0, 4.0], [0.5, 2.5, 2.0, 4.0]]
    losses[1] = [[9.0, 9.0, 9.0, 1.0], [2.0, 1.5, 9.0, 0.0]]
    # Baseline 1, 2, 3, 1. With the longer context model 0 reaches 0.5, 2, 2, 1 and model 1 reaches 1, 1.5, 3, 0.
    gain = [relative_gain(losses, model=i, short=0, long=1, ratio=1.0) for i in range(2)]
    baseline = np.mean([1, 2, 3, 1])
    assert gain[0] == pytest.approx(1 - np.exp(np.mean([0.5, 2, 2, 1]) - baseline))
    assert gain[1] == pytest.approx(1 - np.exp(np.mean([1, 1.5, 3, 0]) - baseline))
    # The hardest half are positions 2 and 1.
    hard = relative_gain(losses, model=1, short=0, long=1, ratio=0.5)
    assert hard == pytest.approx(1 - np.exp(np.mean([3, 1.5]) - np.mean([3, 2])))
    assert relative_gain(losses, model=1, short=0, long=1, ratio=0.25) == 0  # position 2 alone


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_losses_see_their_context_and_no_more(name: str, token_set: MakeTokens) -> None:
    case = laws.Case(name, next(iter(laws.CONFIGS[name])))
    model = case.build()
    tokens = token_set([60, 80])
    grid = ContextGrid(step=6, num_steps=3, block=2, starts=[(0, 18), (0, 40), (1, 71)])
    losses = losses_by_context(run_of(model, window=case.window), tokens, grid, progress=PROGRESS)
    assert losses.shape == (3, 6)
    for j, length in enumerate((6, 12, 18)):
        for b, (i, at) in enumerate(grid.starts):
            expected = nll_of(tokens, i, model, start=at - length, stop=at + 2)
            # Cross-entropy is computed in the logits' own precision.
            np.testing.assert_allclose(losses[j, 2 * b : 2 * b + 2], expected[length:], rtol=1e-6)


def test_grid_keeps_to_its_budget(token_set: MakeTokens) -> None:
    tokens = token_set([400, 900, 30])
    grid = context_grid(tokens, step=8, longest=64, max_tokens=4000)
    assert isinstance(grid, ContextGrid)
    assert grid.lengths == [8, 16, 24, 32, 40, 48, 56, 64] and grid.block == 2
    assert sum(length + grid.block for length in grid.lengths) * len(grid.starts) <= 4000
    assert len(set(grid.starts)) == len(grid.starts) >= 8 and {i for i, _ in grid.starts} == {0, 1}
    assert all(at >= 64 and at + 2 <= tokens.lengths[i] for i, at in grid.starts)
    small = context_grid(tokens, step=8, longest=64, max_tokens=1000)
    assert isinstance(small, ContextGrid) and small.num_steps < 8 and len(small.starts) >= 8
    assert "too little data" in str(context_grid(tokens, step=8, longest=64, max_tokens=100))


@pytest.mark.parametrize("name", sorted(laws.CONFIGS.keys() - {"lstm"}))  # its reach has no end
def test_state_reuse_is_measured(name: str) -> None:
    case = laws.Case(name, next(iter(laws.CONFIGS[name])))
    model = case.build().eval()
    # conv: 4 + 4 + 2 x 4; Transformer-XL: 4 + 6; WaveNet: 1 + 2 x 2 x (1 + 2 + 4).
    expected = {"compressive_transformer": 16, "transformer_xl": 10, "wavenet": 29}[name]
    assert optional_parts(model).receptive_field == expected
    figures = state_reuse_speed(model, vocab_size=laws.VOCAB_SIZE, window=case.window, device=CPU)
    assert expected - case.window <= figures["context_tokens"] < expected
    seconds = figures["seconds_per_token"]
    assert 0 < seconds["carried"] < seconds["anew_for_each_token"]
    assert figures["speedup_over_each_token"] == seconds["anew_for_each_token"] / seconds["carried"]
    assert "absent" in state_reuse_speed(torch.nn.Identity(), vocab_size=3, window=4, device=CPU)


def test_a_model_without_memory_reads_the_last_window_of_its_context(token_set: MakeTokens) -> None:
    """A position at the start of a window would have no context at all, however long the one that is asked for."""
    fields = {**next(iter(laws.CONFIGS["transformer_xl"].values())), "window": 8, "memory": 0, "position": "absolute"}
    torch.manual_seed(0)
    model = laws.randomise(build("transformer_xl", vocab_size=laws.VOCAB_SIZE, **fields))
    tokens = token_set([80])
    grid = ContextGrid(step=4, num_steps=4, block=2, starts=[(0, 18), (0, 40)])
    losses = losses_by_context(run_of(model, window=8, memory=0), tokens, grid, progress=PROGRESS)
    for j, num_read in enumerate((6, 8, 8, 8)):
        for b, (i, at) in enumerate(grid.starts):
            expected = nll_of(tokens, i, model, start=at + 2 - num_read, stop=at + 2)
            np.testing.assert_allclose(losses[j, 2 * b : 2 * b + 2], expected[-2:], rtol=1e-6)
    assert (losses[1:] == losses[1]).all()  # no context beyond the window changes anything
