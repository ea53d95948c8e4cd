"""Dynamic evaluation: equal to the plain one if nothing is learned; never trained on what is not scored yet."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import laws
from tests.engine.conftest import write_utterances
from tests.engine.training import MakeTokens, small_model, small_trainer
from waveform.engine import checkpoint
from waveform.engine.dynamic import DynamicConfig, evaluate_dynamically
from waveform.engine.evaluator import EvaluateConfig, Evaluation, evaluate
from waveform.engine.token_set import TokenSet
from waveform.ranks.distributed import World
from waveform.runs.scoring import EvaluateOptions
from waveform.system.errors import UserError

LENGTHS = [13, 4, 40, 1, 22, 8, 17]


def dynamically(model: Any, tokens: TokenSet, *, window: int, rows: int = 1, **config: Any) -> Evaluation:
    return evaluate_dynamically(
        model,
        tokens,
        EvaluateConfig(window=window),
        DynamicConfig(rows=rows, **{"optimiser": "adam", **config}),
        world=World(),
    )


@pytest.mark.parametrize("name", sorted(laws.CONFIGS))
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_equals_plain_evaluation_without_learning(name: str, optimiser: str, tokens: TokenSet) -> None:
    model, window = small_model(name)
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
    result = dynamically(model, tokens, window=window, optimiser="adam", lr=1e-2)
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
    results = [
        dynamically(model, write_utterances(tmp_path / f"{i}.shard", [first, part]), window=window, lr=0.05)
        for i, part in enumerate([last, (last + 3) % laws.VOCAB_SIZE])
    ]
    assert results[0].nats[0] == results[1].nats[0] and results[0].nats[1] != results[1].nats[1]
    # And one window alone is scored by the weights as they came.
    alone = write_utterances(tmp_path / "alone.shard", [first[:window]])
    plain = evaluate(model, alone, EvaluateConfig(window=window))
    np.testing.assert_allclose(dynamically(model, alone, window=window, lr=0.05).nats, plain.nats, rtol=1e-12)


def test_the_compressor_learns_too(token_set: MakeTokens) -> None:
    """Its loss is the only one that reaches it; without it the scores after the first compressions differ."""
    model, window = small_model("compressive_transformer")
    tokens = token_set([30 * window])
    with_loss = dynamically(model, tokens, window=window, lr=1e-2, aux_weight=1.0)
    without = dynamically(model, tokens, window=window, lr=1e-2, aux_weight=0.0)
    assert with_loss.nats[0] != without.nats[0]


def test_continued_is_the_next_step_of_training(tmp_path: Path) -> None:
    """The first window is learned from as training would have: with its moments, its step and its rate."""
    trainer = small_trainer(
        "compressive_transformer",
        write_utterances(tmp_path / "a.shard", [np.random.default_rng(0).integers(0, laws.VOCAB_SIZE, 400)]),
        tmp_path / "run",
        dtype=torch.float64,
        max_steps=5,
    )
    trainer.run()
    found = checkpoint.newest(tmp_path / "run")
    optimiser = DynamicConfig("continued", lr=0.25, checkpoint=found, beta2=trainer.config.beta2).build(
        [parameter for group in trainer.learner.groups.values() for parameter in group]
    )
    (group,), (trained,) = optimiser.param_groups, trainer.learner.optimiser.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, trained["betas"], trained["eps"])
    for parameter in group["params"]:
        own, expected = optimiser.state[parameter], trainer.learner.optimiser.state[parameter]
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) for name in own) and (not own or own["step"] == 5)


def test_mistakes(token_set: MakeTokens) -> None:
    with pytest.raises(UserError, match="--dynamic-optimiser is 'lbfgs'; choose sgd, adam or continued"):
        EvaluateOptions(dynamic_optimiser="lbfgs")
    model, window = small_model("wavenet")
    with pytest.raises(UserError, match="diverged"):
        dynamically(model, token_set([80]), window=window, optimiser="sgd", lr=1e300, clip_norm=1e9)
