"""Windows that overlap: every token is scored once, with the context that the stride leaves it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests import laws
from tests.analyses.conftest import run_of, text_and_inputs
from tests.calling import cli, figures_of, prepared_tones, settings
from tests.engine.conftest import write_tokens
from waveform.models.registry import build
from waveform.ranks.distributed import World
from waveform.runs.opened import TrainedRun
from waveform.runs.sliding import evaluate_sliding
from waveform.system.errors import UserError

FIELDS = {"num_layers": 2, "d_model": 12, "num_heads": 3, "d_feedforward": 20, "window": 6, "position": "absolute"}


def opened(memory: int, *, labels: Sequence[str] = ()) -> TrainedRun:
    torch.manual_seed(0)
    model = laws.randomise(build("transformer_xl", vocab_size=laws.VOCAB_SIZE, **FIELDS, memory=memory))
    return run_of(model, window=6, labels=labels, name="transformer_xl", memory=memory)


@pytest.mark.parametrize("stride", [1, 2, 4, 6])
def test_equals_each_token_scored_alone(stride: int, tmp_path: Path) -> None:
    run, tokens = opened(0), write_tokens(tmp_path / "a.shard", [3, 6, 25])
    classes = torch.arange(laws.VOCAB_SIZE) % 2
    result = evaluate_sliding(run, tokens, stride=stride, world=World(), classes=classes)
    assert result.counts.tolist() == tokens.lengths
    assert result.class_nats is not None and result.class_nats.sum() == pytest.approx(result.nats.sum())
    for utterance, length in enumerate(tokens.lengths):
        text, inputs = text_and_inputs(tokens, utterance, start=0, stop=length)
        nats = 0.0
        for i in range(length):
            # The first window that ends behind token i: windows begin at multiples of the stride.
            begin = 0 if i < 6 else -(-(i + 1 - 6) // stride) * stride
            state = run.model.init_state(1, device="cpu", dtype=torch.float64)
            hidden = run.model.forward(inputs[:, begin : i + 1], state).hidden
            nats -= float(run.model.head.logits(hidden)[0, -1].log_softmax(-1)[text[i]])
        assert result.nats[utterance] == pytest.approx(nats, rel=1e-6)


def test_what_cannot_slide_is_refused(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "a.shard", [25])
    with pytest.raises(UserError, match=r"--stride is for models without memory, and .* has model\.memory=4"):
        evaluate_sliding(opened(4), tokens, stride=2, world=World())
    with pytest.raises(UserError, match="--stride is for runs without labels"):
        evaluate_sliding(opened(0, labels=["ann"]), tokens, stride=2, world=World())
    for stride in (0, 7):
        with pytest.raises(UserError, match=f"--stride is {stride}; it must be from 1 to the window, 6"):
            evaluate_sliding(opened(0), tokens, stride=stride, world=World())


def test_sound_is_scored_so_too(tmp_path: Path) -> None:
    """Moved by its whole length, the window of a model without memory scores as without a stride."""
    data = prepared_tones(tmp_path, train=2, valid=1, test=1, seconds=0.05)
    without = ["model.memory=0", "model.prediction=none", "train.max_steps=1"]
    cli("train", data, tmp_path / "run", *settings("transformer_xl"), *without)
    evaluate = ["evaluate", tmp_path / "run"]
    plain, moved = (figures_of(tmp_path / "e.json", *evaluate, *stride) for stride in ([], ["--stride", 64]))
    assert moved["nats_per_token"] == pytest.approx(plain["nats_per_token"], rel=1e-5) and moved["state"] == "by window"
    assert moved["linear_prediction_nats_per_token"] == plain["linear_prediction_nats_per_token"]
