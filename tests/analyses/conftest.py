"""Small token sets and runs for the tests of analyses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import laws
from tests.engine.conftest import token_set as token_set  # a fixture
from waveform.analyses import hooks
from waveform.engine.token_set import TokenSet
from waveform.runs.opened import TrainedRun

QUIET: dict[str, Any] = {"show_progress": False}


@pytest.fixture(autouse=True)
def two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer utterances side by side than there are, so that rows are dealt several times."""
    monkeypatch.setattr(hooks, "fast_rows", lambda *_, **__: 2)


def text_and_inputs(tokens: TokenSet, index: int, *, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """These tokens [n] of an utterance, and what a model reads to predict them [1, n]."""
    text = torch.from_numpy(tokens.read(index, start=start, stop=stop).astype(np.int64))
    return text, torch.cat([torch.tensor([laws.VOCAB_SIZE]), text[:-1]])[None]


def nll_of(tokens: TokenSet, index: int, model: Any, *, start: int, stop: int) -> torch.Tensor:
    """NLL [n] of these tokens of an utterance, read in one call from a fresh state."""
    text, inputs = text_and_inputs(tokens, index, start=start, stop=stop)
    hidden = model(inputs, model.init_state(1, device="cpu", dtype=torch.float64)).hidden
    return -model.head.logits(hidden)[0].log_softmax(-1)[torch.arange(len(text)), text]


def run_of(model: Any, *, window: int, labels: Sequence[str] = (), **fields: Any) -> TrainedRun:
    """An opened run of a model with random weights; fields: what its configuration says of the model."""
    config = {"model": fields, "train": {"window": window}, "dataset": {"labels": list(labels)}}
    model = model.eval().requires_grad_(False)
    return TrainedRun(Path("run"), config, model, step=0, train_seconds=0.0, tokens_seen=0, given=Path("run"))
