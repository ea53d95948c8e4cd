"""Builds the small learners and trainers of the engine's tests."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.laws import VOCAB_SIZE, first_fields
from waveform.engine.token_learner import TokenLearner
from waveform.engine.token_set import TokenSet
from waveform.engine.train_config import TrainConfig
from waveform.engine.trainer import RunContext, Trainer
from waveform.models.registry import build
from waveform.ranks.distributed import World

MakeTokens = Callable[[list[int]], TokenSet]  # the fixture `token_set`


def utterances_of(tokens: TokenSet) -> list[list[int]]:
    return [tokens.read(i, start=0, stop=10**9).tolist() for i in range(len(tokens))]


def small_model(name: str) -> tuple[Any, int]:
    """A model of `laws.first_fields`, in fp64, and its window."""
    torch.manual_seed(0)
    fields = first_fields(name)
    model: Any = build(name, vocab_size=VOCAB_SIZE, **fields)
    return model.double().eval().requires_grad_(False), fields.get("window", 4)


def small_learner(
    name: str,
    tokens: TokenSet,
    *,
    world: World | None = None,
    fields: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **train: Any,
) -> TokenLearner:
    """A learner of a model of `laws.first_fields`, or of the given ones, of four rows."""
    fields = first_fields(name) if fields is None else fields
    torch.manual_seed(1)
    model = build(name, vocab_size=VOCAB_SIZE, **fields).to(dtype)
    window = train.get("window") or fields.get("window", 4)
    defaults = {
        **{"max_steps": 8, "batch_size": 4, "chunk": 2 * window, "lr": 1e-2, "warmup_steps": 2, "device": "cpu"},
        **{"log_every": 2, "evaluate_every": 1000, "checkpoint_every": 1000},
    }
    config, world = TrainConfig(**{**defaults, **train}), world or World(show_progress=False)
    return TokenLearner(model, config, tokens=tokens, window=window, seed=2, world=world)


def small_trainer(name: str, tokens: TokenSet, run_dir: Path, *, world: World | None = None, **options: Any) -> Trainer:
    """Its trainer in `run_dir`, which validates with the same tokens."""
    learner = small_learner(name, tokens, world=world, **options)
    return Trainer(learner, RunContext(run_dir, learner.world), validate=partial(learner.evaluated, tokens))
