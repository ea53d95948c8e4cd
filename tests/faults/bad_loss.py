"""Losses, states and gradients that are not finite, planted in one utterance: training stops or skips as configured."""

import contextlib
import io
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.engine.test_trainer import assert_bitwise_equal, everything
from tests.engine.training import small_trainer
from tests.faults.fault import fault
from tests.laws import CONFIGS, VOCAB_SIZE
from waveform.engine import checkpoint
from waveform.engine.interface import reset_rows
from waveform.engine.nonfinite import Diverged
from waveform.engine.shards import Shard, ShardWriter
from waveform.engine.token_learner import TokenLearner
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import Trainer

POISON = VOCAB_SIZE - 1  # the token that a single utterance contains, once
_STEPS = 12
KINDS = ("loss", "state", "gradient")


class _BadGradient(torch.autograd.Function):
    """Passes values on; its gradients are not finite."""

    @staticmethod
    def forward(ctx: Any, nll: Tensor) -> Tensor:
        return nll.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


def poisoned_tokens(path: Path, source: random.Random) -> tuple[TokenSet, str, int]:
    """Write utterances, one of them poisoned; return the set, that utterance's name and the poison's position in it."""
    lengths = [source.randrange(20, 80) for _ in range(10)]
    bad = source.randrange(len(lengths))
    position = source.randrange(lengths[bad])
    numbers = np.random.default_rng(source.randrange(1 << 30))
    with ShardWriter(path, vocab_size=VOCAB_SIZE) as writer:
        for i, length in enumerate(lengths):
            values = numbers.integers(0, POISON, length)
            if i == bad:
                values[position] = POISON
            writer.write(f"utterance_{i:03d}", [values])
    return TokenSet([Shard(path)], vocab_size=VOCAB_SIZE), f"utterance_{bad:03d}", position


def plant(learner: TokenLearner, kind: str) -> None:
    """Make the poison have the effect `kind`, by changing parts of the model."""
    nll = learner.model.head.nll

    def bad_nll(hidden: Tensor, targets: Tensor) -> Tensor:
        value, poisoned = nll(hidden, targets), targets == POISON
        if kind == "loss":
            return torch.where(poisoned, math.inf, value)
        return _BadGradient.apply(value) if kind == "gradient" and poisoned.any() else value

    learner.model.head.nll = bad_nll
    if kind == "state":

        def bad_embedding(module: Any, arguments: tuple[Tensor], output: Tensor) -> Tensor:
            return torch.where((arguments[0] == POISON)[..., None], math.nan, output)

        embeddings = [m for m in learner.module.modules() if isinstance(m, torch.nn.Embedding)]
        embeddings[0].register_forward_hook(bad_embedding)


def bad_steps(learner: TokenLearner, name: str, position: int, kind: str, *, steps: int) -> dict[int, list[int]]:
    """Return the steps in which the poison is a target (for `state`, an input), each with the rows that read it."""
    found: dict[int, list[int]] = {}
    cursor = learner.stream.cursor()
    # With state=chunk, each chunk begins with begin-of-utterance, whatever token is before it.
    unread = kind == "state" and learner.config.state == "chunk" and (position + 1) % learner.config.chunk == 0
    for step in range(0 if unread else steps):
        for row, spans in enumerate(zip(*learner.stream.next_chunk().spans, strict=True)):
            for part in (part for window in spans for part in window):
                # An input is the token before a target; an utterance's last token is never an input.
                is_read = part.start <= position + (kind == "state") < part.stop
                if is_read and learner.stream.tokens.names[part.utterance] == name:
                    found.setdefault(step, []).append(row)
    learner.stream.seek(cursor)
    return found


def _reference(trainer: Trainer, bad: dict[int, list[int]], kind: str) -> dict[str, Any]:
    """Return what training must end with: without poison, bad steps only read, their bad rows reset afterwards."""
    learner = trainer.learner
    while learner.step < _STEPS:
        if learner.step not in bad:
            learner.update()
            continue
        learner.tokens_seen += _read_only(learner)
        rows = torch.zeros(4, dtype=torch.bool)
        rows[bad[learner.step] if kind != "gradient" else []] = True
        learner.state = reset_rows(learner.state, learner.fresh, rows)
        learner.step += 1
    return everything(trainer)


def _read_only(learner: TokenLearner) -> int:
    chunk = learner.stream.next_chunk()
    learner.accumulate_gradients([chunk])
    learner.optimiser.zero_grad(set_to_none=True)
    return chunk.num_scored


def say(action: Any) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        action()
    return printed.getvalue()


def _case(folder: Path, source: random.Random, *, name: str, kind: str, mode: str) -> int:
    tokens, utterance, position = poisoned_tokens(folder / "shard", source)
    options: dict[str, Any] = {"state": mode, "max_steps": _STEPS, "checkpoint_every": 1, "evaluate_tokens": 0}
    options |= {"keep_checkpoints": 2 * _STEPS, "decay_steps": _STEPS}

    def trainer(run: str, **more: Any) -> Trainer:
        made = small_trainer(name, tokens, folder / run, fields=CONFIGS[name][_FIELDS[name]], **options, **more)
        if run != "reference":
            plant(made.learner, kind)
        return made

    reference = trainer("reference")
    bad = bad_steps(reference.learner, utterance, position, kind, steps=_STEPS)
    if not bad:
        return 0
    expected, first = _reference(reference, bad, kind), min(bad)

    # stop: it says in which step and row, and keeps the last good checkpoint.
    stopping, printed = trainer("stop"), ""
    try:
        stopping.run()
    except Diverged as error:
        printed = str(error)
    assert f"not finite at step {first}" in printed, (printed, bad)
    assert kind == "gradient" or (f"row {bad[first][0]} " in printed and utterance in printed), (printed, bad)
    kept = checkpoint.newest(folder / "stop")
    assert (kept.step if kept else 0) == first and (kept is None) == ("none was saved yet" in printed), printed
    assert kept is None or all(torch.isfinite(w).all() for w in kept.model_weights().values())

    # skip: exactly as if the step's update had not been made, and also if the run is cut right after it.
    skipping = trainer("skip", on_nonfinite="skip")
    printed = say(skipping.run)
    assert_bitwise_equal(everything(skipping), expected)
    assert printed.count("is skipped") == skipping.learner.finite.skipped == len(bad), printed
    assert f"step {first} is skipped" in printed and (kind == "gradient" or utterance in printed), printed
    cut = {**options, "max_steps": first + 1}
    parts = small_trainer(
        name, tokens, folder / "parts", fields=CONFIGS[name][_FIELDS[name]], **cut, on_nonfinite="skip"
    )
    plant(parts.learner, kind)
    say(parts.run)
    torch.manual_seed(99)
    rest = trainer("parts", on_nonfinite="skip")
    assert rest.learner.step == first + 1 and rest.learner.finite.skipped == 1
    say(rest.run)
    assert_bitwise_equal(everything(rest), expected)
    return len(bad)


_FIELDS = {name: next(iter(cases)) for name, cases in CONFIGS.items()}


@fault(
    "loss that is not finite",
    "training stops, names step, row and utterance, and keeps the last good checkpoint; or it skips exactly that "
    "step's update, and resumes bit for bit",
    short=9,
    long=200,
)
def _bad_loss(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    kinds, skipped = [(n, k) for k in KINDS for n in ("compressive_transformer", "transformer_xl", "wavenet")], 0
    for case in range(cases):
        name, kind = kinds[case % len(kinds)]
        if name == "wavenet" and kind == "state":
            name = "compressive_transformer"  # WaveNet embeds by a convolution; the loss poisons its state
        where = folder / str(case)
        where.mkdir()
        skipped += _case(where, source, name=name, kind=kind, mode=source.choice(["utterance", "carry", "chunk"]))
    assert skipped, "no case reached its bad step"
    return {"skipped_steps": skipped}


@fault(
    "loss or weights not finite for good",
    "skipping ends at once if the weights are bad, else after train.max_skipped steps; bad weights are never saved",
    short=4,
    long=50,
)
def _bad_for_good(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Weights, or all losses, that are not finite from some step on: skipping gives up, and what is saved is good."""
    tokens, _, _ = poisoned_tokens(folder / "shard", source)
    for case in range(cases):
        at, limit, weights = source.randrange(1, 5), source.randrange(1, 5), case % 2 == 0
        options = {"max_steps": 50, "checkpoint_every": 1, "on_nonfinite": "skip", "max_skipped": limit}
        trainer = small_trainer("compressive_transformer", tokens, folder / f"run_{case}", **options)
        update, nll = trainer.learner.update, trainer.learner.model.head.nll

        def poisoned(trainer: Trainer = trainer, update: Any = update, at: int = at, weights: bool = weights) -> Any:
            if weights and trainer.learner.step == at:
                next(iter(trainer.learner.module.parameters())).data.fill_(math.nan)
            return update()

        def bad_nll(
            hidden: Tensor, targets: Tensor, trainer: Trainer = trainer, nll: Any = nll, at: int = at
        ) -> Tensor:
            return nll(hidden, targets) * (math.inf if trainer.learner.step >= at else 1)

        trainer.learner.update = poisoned
        if not weights:
            trainer.learner.model.head.nll = bad_nll
        printed: list[str] = []

        def run(trainer: Trainer = trainer, printed: list[str] = printed) -> None:
            try:
                trainer.run()
            except Diverged as error:
                printed.append(str(error))

        num_skipped = 0 if weights else limit
        assert say(run).count("is skipped") == num_skipped
        assert printed and f"not finite at step {at + num_skipped}" in printed[0], printed
        assert ("the weights are not finite" if weights else f"train.max_skipped is {limit}") in printed[0], printed
        kept = checkpoint.newest(folder / f"run_{case}")
        assert kept is not None and kept.step == at + num_skipped
        assert all(torch.isfinite(value).all() for value in kept.model_weights().values())
    return {}
