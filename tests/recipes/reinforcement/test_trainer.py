"""Training agents: exact resume (law 7), what is logged, a loss that is not finite, and that agents learn."""

import json
from pathlib import Path

import pytest
import torch

from tests.engine.test_trainer import assert_bitwise_equal
from tests.recipes.reinforcement.small import MODELS, small_learner, small_trainer
from waveform.engine.interface import state_tensors
from waveform.engine.metrics import read_metrics
from waveform.engine.nonfinite import Diverged


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_is_bitwise_equal(name: str, tmp_path: Path) -> None:
    trainer, whole = small_trainer(tmp_path / "whole", name=name)
    trainer.run()
    small_trainer(tmp_path / "cut", name=name, max_steps=3, checkpoint_every=2)[0].run()
    trainer, resumed = small_trainer(tmp_path / "cut", name=name)
    assert resumed.step == 3
    trainer.run()
    ends = [[*one.agent.parameters(), *state_tensors(one.actors.state)] for one in (whole, resumed)]
    assert_bitwise_equal(*ends)
    logs = [read_metrics(tmp_path / folder) for folder in ("whole", "cut")]
    times = ("seconds", "steps_per_second", "lr")  # the cosine's end differs with max_steps only in the first part
    kept = [[{k: v for k, v in r.items() if k not in times} for r in log if r["step"] > 4] for log in logs]
    assert json.dumps(kept[0]) == json.dumps(kept[1])


def test_what_was_played_is_logged(tmp_path: Path) -> None:
    result = small_trainer(tmp_path / "run")[0].run()
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [2, 4, 6]
    assert result.tokens_seen == records[-1]["steps_seen"] == 6 * 4 * 8
    assert sum(record["episodes"] for record in records) == 4 * (6 * 8 // 13)
    assert {"return_mean", "entropy", "aux_loss", "grad_norm_compressor"} <= records[-1].keys()


def test_a_loss_that_is_not_finite_stops_training(tmp_path: Path) -> None:
    trainer, learner = small_trainer(tmp_path / "run")
    learner.update()
    trainer.save()
    with torch.no_grad():
        learner.agent.value.bias.fill_(float("nan"))
    with pytest.raises(Diverged, match=r"value_loss.* not finite at step 1.* Lower train\.lr.* step 1 in "):
        trainer.run()


@pytest.mark.slow
def test_an_agent_learns_the_way_to_the_pad() -> None:
    """In a second or two of training it finds the pad and the objects several times as often as it did at first."""
    learner = small_learner(batch_size=64, max_steps=80, lr=1e-2, chunk=16)
    rates = []
    for _ in range(80):
        before = float(learner.sums[3])
        learner.update()
        rates.append(float(learner.sums[3]) - before)
    assert sum(rates[-10:]) > 1.5 * sum(rates[:10])
