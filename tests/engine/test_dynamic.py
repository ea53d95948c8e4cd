"""Dynamic evaluation: equal to the plain one if nothing is learned; never trained on what is not scored yet."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import laws
from tests.engine.conftest import write_utterances
from tests.engine.training import MakeTokens, small_model, small_trainer
from waveform.engine import checkpoint, trackers
from waveform.engine.dynamic import DynamicConfig, evaluate_dynamically
from waveform.engine.evaluator import EvaluateConfig, Evaluation, evaluate
from waveform.engine.interface import shift_right
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.ranks.distributed import World
from waveform.runs.scoring import EvaluateOptions
from waveform.system.errors import UserError

LENGTHS = [13, 4, 40, 1, 22, 8, 17]


def dynamically(model: Any, tokens: TokenSet, *, window: int, optimiser: str = "adam", **learning: Any) -> Evaluation:
    config = DynamicConfig(optimiser, **{"rows": 1, **learning})
    return evaluate_dynamically(model, tokens, EvaluateConfig(window=window), config, world=World())


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_equals_plain_evaluation_without_learning(name: str, optimiser: str, tokens: TokenSet) -> None:
    """And without dropout, if the model was trained with it."""
    model, window = small_model(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    plain = evaluate(model, tokens, EvaluateConfig(window=window))
    result = dynamically(model, tokens, window=window, rows=2, optimiser=optimiser, lr=0.0)
    np.testing.assert_allclose(result.nats, plain.nats, rtol=1e-12)
    assert result.counts.tolist() == LENGTHS


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_learns_what_repeats_and_leaves_the_model(name: str, tmp_path: Path) -> None:
    model, window = small_model(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pattern = np.random.default_rng(0).integers(0, laws.VOCAB_SIZE, 6)
    tokens = write_utterances(tmp_path / "a.shard", [np.tile(pattern, 20)] * 3)
    plain = evaluate(model, tokens, EvaluateConfig(window=window))
    result = dynamically(model, tokens, window=window, lr=1e-2)
    assert result.nats_per_token < 0.8 * plain.nats_per_token
    assert result.nats[2] < result.nats[0]
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
def test_scores_before_it_learns(name: str, tmp_path: Path) -> None:
    """A changed last token changes the score of no earlier window, though windows before it were learned from."""
    model, window = small_model(name)
    first = np.random.default_rng(1).integers(0, laws.VOCAB_SIZE, 5 * window)
    last = np.random.default_rng(2).integers(0, laws.VOCAB_SIZE, 1)
    sets = [write_utterances(tmp_path / f"{i}.shard", [first, (last + i) % laws.VOCAB_SIZE]) for i in (0, 3)]
    one, other = (dynamically(model, tokens, window=window, lr=0.05).nats for tokens in sets)
    assert one[0] == other[0] and one[1] != other[1]
    # And one window alone is scored by the weights as they came.
    alone = write_utterances(tmp_path / "alone.shard", [first[:window]])
    plain = evaluate(model, alone, EvaluateConfig(window=window))
    np.testing.assert_allclose(dynamically(model, alone, window=window, lr=0.05).nats, plain.nats, rtol=1e-12)


@pytest.mark.parametrize("clip_norm", [1e9, 1e-2])
def test_an_update_follows_the_clipped_gradient_of_the_mean(clip_norm: float, tmp_path: Path) -> None:
    model, window = small_model("wavenet")
    text = np.random.default_rng(0).integers(0, laws.VOCAB_SIZE, (2, window))
    tokens = write_utterances(tmp_path / "a.shard", list(text))
    result = dynamically(model, tokens, window=window, optimiser="sgd", lr=0.5, clip_norm=clip_norm)
    learned, first = copy.deepcopy(model).requires_grad_(True), torch.from_numpy(text[:1])
    hidden = learned(shift_right(first, vocab_size=laws.VOCAB_SIZE), laws.fresh_state(learned, 1)).hidden
    learned.head.nll(hidden, first).mean().backward()
    nn.utils.clip_grad_norm_(learned.parameters(), clip_norm)
    torch.optim.SGD(learned.parameters(), lr=0.5).step()
    expected = evaluate(learned, tokens, EvaluateConfig(window=window))
    assert result.nats[1] == pytest.approx(expected.nats[1], rel=1e-9)


def test_the_compressor_learns_too(token_set: MakeTokens) -> None:
    """Its loss is the only one that reaches it; without it the scores after the first compressions differ."""
    model, window = small_model("compressive_transformer")
    tokens = token_set([30 * window])
    results = [dynamically(model, tokens, window=window, lr=1e-2, aux_weight=weight) for weight in (1.0, 0.0)]
    assert results[0].nats[0] != results[1].nats[0]


def test_continued_is_the_next_step_of_training(tmp_path: Path) -> None:
    """The first window is learned from as training would have: with its moments, its step and its rate."""
    tokens = write_utterances(tmp_path / "a.shard", [np.random.default_rng(0).integers(0, laws.VOCAB_SIZE, 400)])
    trainer = small_trainer("compressive_transformer", tokens, tmp_path / "run", dtype=torch.float64, max_steps=5)
    trainer.run()
    learner, found = trainer.learner, checkpoint.newest(tmp_path / "run")
    config = DynamicConfig("continued", lr=0.25, checkpoint=found, beta2=trainer.config.beta2)
    optimiser = config.build([parameter for group in learner.groups.values() for parameter in group])
    (group,), (trained,) = optimiser.param_groups, learner.optimiser.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, trained["betas"], trained["eps"])
    for parameter in group["params"]:
        own, expected = optimiser.state[parameter], learner.optimiser.state[parameter]
        torch.testing.assert_close(own, expected, rtol=0, atol=0)
        assert not own or own["step"] == 5


def test_continuing_needs_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may have been trained with one that is not installed where it is evaluated."""
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    train = {**vars(TrainConfig(max_steps=8, lr=1e-2)), "log": "wandb"}
    run: Any = SimpleNamespace(folder=tmp_path, step=8, train_seconds=1.0, config={"train": train})
    monkeypatch.setattr(checkpoint, "newest", lambda folder: SimpleNamespace(step=8))
    options = EvaluateOptions(dynamic=True, dynamic_optimiser="continued")
    config = options.dynamic_config(run)
    assert config is not None and config.lr == TrainConfig(max_steps=8, lr=1e-2).learning_rate(8, 1.0)


def test_mistakes(token_set: MakeTokens) -> None:
    with pytest.raises(UserError, match="--dynamic-optimiser is 'lbfgs'; choose sgd, adam or continued"):
        EvaluateOptions(dynamic_optimiser="lbfgs")
    model, window = small_model("wavenet")
    with pytest.raises(UserError, match="diverged"):
        dynamically(model, token_set([80]), window=window, optimiser="sgd", lr=1e300, clip_norm=1e9)
