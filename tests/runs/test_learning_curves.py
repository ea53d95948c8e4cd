"""Validation NLL against updates, tokens and seconds, as the log of a training has it."""

import json
from pathlib import Path

from tests.calling import Capsys
from waveform.engine.metrics import read_metrics
from waveform.engine.train_config import TrainConfig
from waveform.runs.learning_curves import LearningCurve, learning_curve, save_learning_curves


def test_updates_are_counted_as_training_makes_them() -> None:
    config, arrived = TrainConfig(update_period=4, update_period_from=10), [0]
    while arrived[-1] < 50:
        arrived.append(arrived[-1] + config.chunks_of_update(arrived[-1]))
    records = [{"kind": "evaluate", "step": step, "seconds": 1.0, "nll_nats": 4.0} for step in arrived]
    assert learning_curve(records, vars(config)).updates == list(range(21)) and arrived[-1] == 50


def test_a_log_becomes_a_curve(tmp_path: Path, capsys: Capsys) -> None:
    records = [
        {"kind": "train", "step": 2, "seconds": 1.0, "nll_nats": 5.0, "tokens_seen": 100},
        {"kind": "evaluate", "step": 3, "seconds": 1.5, "nll_nats": 4.0},
        {"kind": "evaluate", "step": 3, "seconds": 1.6},
        {"kind": "train", "step": 4, "seconds": 2.0, "nll_nats": 3.0, "tokens_seen": 180},
        {"kind": "train", "step": 4, "seconds": 2.0, "nll_nats": 3.0, "tokens_seen": "180"},
        {"kind": "evaluate", "step": 4, "seconds": 2.0, "nll_nats": 2.5},
        {"kind": "evaluate", "step": 6, "seconds": 3.0, "nll_nats": 2.0, "tokens_seen": 290},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    curve = learning_curve(read_metrics(tmp_path), {"update_period": 2, "update_period_from": 2})
    assert curve == LearningCurve([3, 4, 6], [2, 3, 4], [140.0, 180.0, 290.0], [1.5, 2.0, 3.0], [4.0, 2.5, 2.0])
    assert "is damaged in line 3, 5; ignoring that" in capsys.readouterr().err
    empty = LearningCurve([], [], [], [], [])
    save_learning_curves(tmp_path / "new" / "c.png", [("one", curve), ("none", empty)], unit="sample")
    assert (tmp_path / "new" / "c.png").read_bytes().startswith(b"\x89PNG")
