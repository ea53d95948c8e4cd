"""What Transformer-XL's tables need of the command: ablations, averaged weights, speed by context length."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.text import load
from tests.recipes.calling import Capsys, figures_of, mistake, printed, run
from waveform.engine.checkpoint import CHECKPOINTS_DIR
from waveform.runs.opened import average_weights

SHORT = ["model=transformer_xl", "preset=smoke", "train.max_steps=4", "train.evaluate_every=4"]


@pytest.fixture(scope="module")
def txl(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Transformer-XL that keeps three checkpoints."""
    run_dir = tmp_path_factory.mktemp("tables") / "run"
    run("train", data, run_dir, *SHORT, "train.checkpoint_every=1", "train.keep_checkpoints=3")
    return run_dir


def test_averaged_weights_are_the_mean_of_checkpoints(txl: Path) -> None:
    opened = load(txl)
    average_weights(opened, 2)
    parts = [load_file(txl / CHECKPOINTS_DIR / f"step_{step:08d}" / "model.safetensors") for step in (3, 4)]
    model: Any = opened.model
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2)
        assert not parts[0][name].is_floating_point() or not torch.equal(parts[0][name], parts[1][name]), name


def test_evaluate_with_averaged_weights(txl: Path, tmp_path: Path, capsys: Capsys) -> None:
    last = figures_of(tmp_path / "last.json", "evaluate", txl)
    mean = figures_of(tmp_path / "mean.json", "evaluate", txl, "--average", 3)
    assert (last["averaged_checkpoints"], mean["averaged_checkpoints"]) == (1, 3)
    assert mean["nats_per_token"] != last["nats_per_token"]
    assert "with the mean weights of the last 3 checkpoints" in capsys.readouterr().out
    said = mistake(["evaluate", txl, "--average", 4])
    assert "has 3 complete checkpoints; train with train.keep_checkpoints=4" in said
    assert "--average is 0" in mistake(["evaluate", txl, "--average", 0])


def test_speed_by_context_length(txl: Path, tmp_path: Path, capsys: Capsys) -> None:
    figures = figures_of(tmp_path / "s.json", "speed", txl, "--contexts", "48,800", "--plot", tmp_path / "s.png")
    assert [entry["context"] for entry in figures["contexts"]] == [48, 800]
    for entry in figures["contexts"]:
        seconds = entry["seconds_per_token"]
        assert entry["times_slower"] == pytest.approx(seconds["anew"] / seconds["carried"])
    assert figures["contexts"][1]["times_slower"] > 8  # it reads 800 tokens for each, and a window is 16
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-3:-1]] == ["-", "363"]
    with pytest.raises(SystemExit, match="2"):
        run("speed", txl, "--contexts", "x")
    assert "argument --contexts: invalid numbers value: 'x'" in capsys.readouterr().err


def test_an_lstm_is_in_the_group_of_table_8(txl: Path, data: Path, tmp_path: Path) -> None:
    """It resumes, is scored, sampled from and compared like the others, and has no attention to show."""
    short = ["model=lstm", *SHORT[1:]]
    run("train", data, tmp_path / "lstm", *short, "train.max_steps=2")
    run("train", data, tmp_path / "lstm", *short)
    assert figures_of(tmp_path / "e.json", "evaluate", tmp_path / "lstm", "--dynamic")["step"] == 4
    run("sample", tmp_path / "lstm", "--prompt", "the", "--tokens", 9)
    figures = figures_of(tmp_path / "a.json", "analyse", txl, tmp_path / "lstm", "--tokens", 6000)
    assert len(figures["effective_context"]["by_ratio"]["0.1"]) == 2
    assert figures["runs"][1]["attention_by_head"] == {"absent": "the model has no attention"}
    assert "lstm" in printed("compare", txl, tmp_path / "lstm")


@pytest.mark.slow
def test_ablations_train_and_are_scored(txl: Path, data: Path, tmp_path: Path) -> None:
    for study in ("txl_shaw", "txl_transformer", "txl_learned_positions"):
        run("train", data, tmp_path / study, *SHORT, f"study={study}")
    slid = figures_of(tmp_path / "slid.json", "evaluate", tmp_path / "txl_transformer", "--stride", 4)
    cut = figures_of(tmp_path / "cut.json", "evaluate", tmp_path / "txl_transformer")
    assert slid["num_tokens"] == cut["num_tokens"] and slid["stride"] == 4
    assert slid["nats_per_token"] != cut["nats_per_token"]
    group = [txl, tmp_path / "txl_shaw", tmp_path / "txl_transformer"]
    figures = figures_of(tmp_path / "a.json", "analyse", *group, "--tokens", 6000, "--context-step", 16)
    assert len(figures["effective_context"]["by_ratio"]["0.1"]) == 3
    assert list(figures["runs"][1]["attention_by_head"]["terms"]) == ["a", "b"]
    assert "without memory" in mistake(["evaluate", txl, "--stride", 4])
    run("evaluate", tmp_path / "txl_learned_positions", "--stride", 4)
    said = mistake(["evaluate", tmp_path / "txl_learned_positions", "--memory", 16])
    assert "model.position=learned" in said and "set model.memory=0" in said
