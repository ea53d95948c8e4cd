"""Losses, states and gradients that are not finite, planted in one utterance: training stops or skips as configured."""

import contextlib
import io
import math
import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.engine.conftest import write_utterances
from tests.engine.test_trainer import assert_bitwise_equal, everything
from tests.engine.training import small_trainer
from tests.faults.fault import fault
from tests.laws import CONFIGS, VOCAB_SIZE
from waveform.engine import checkpoint, nonfinite
from waveform.engine.checkpoint import Checkpoint
from waveform.engine.interface import reset_rows
from waveform.engine.nonfinite import Diverged
from waveform.engine.shards import Shard
from waveform.engine.token_learner import TokenLearner
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import Trainer
from waveform.ranks.distributed import World

POISON = VOCAB_SIZE - 1  # the token that a single utterance contains, once
_STEPS = 12
KINDS = ("loss", "state", "gradient")


def poisoned_tokens(path: Path, source: random.Random) -> tuple[str, int]:
    """Write utterances, one of them poisoned; return that utterance's name and the poison's position in it."""
    lengths = [source.randrange(20, 80) for _ in range(10)]
    bad = source.randrange(len(lengths))
    position = source.randrange(lengths[bad])
    numbers = np.random.default_rng(source.randrange(1 << 30))
    utterances = [numbers.integers(0, POISON, length) for length in lengths]
    utterances[bad][position] = POISON
    write_utterances(path, utterances)
    return f"utterance_{bad:03d}", position


def plant(learner: TokenLearner, kind: str) -> None:
    """Make the poison have the effect `kind`, by changing parts of the model."""
    nll = learner.model.head.nll

    def bad_nll(hidden: Tensor, targets: Tensor) -> Tensor:
        value, poisoned = nll(hidden, targets), targets == POISON
        if kind == "loss":
            return torch.where(poisoned, math.inf, value)
        if kind == "gradient" and poisoned.any():
            value.register_hook(lambda gradient: gradient * math.nan)
        return value

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
        chunk = learner.stream.next_chunk()
        learner.accumulate_gradients([chunk])
        learner.optimiser.zero_grad(set_to_none=True)
        learner.tokens_seen += chunk.num_scored
        rows = torch.zeros(4, dtype=torch.bool)
        rows[bad[learner.step] if kind != "gradient" else []] = True
        learner.state = reset_rows(learner.state, learner.fresh, rows)
        learner.step += 1
    return everything(trainer)


def train(trainer: Trainer) -> tuple[str, str]:
    """Train; return what was printed and the error that ended it, if any."""
    error = ""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            trainer.run()
        except Diverged as diverged:
            error = str(diverged)
    return printed.getvalue(), error


def trainer_of(case: dict[str, Any], run: Path, world: World | None = None, **more: Any) -> Trainer:
    """A trainer of a case: its `model`, on `tokens`, with `options`; without what is to go wrong, its `kind`."""
    name, fields = case["model"]
    tokens = TokenSet([Shard(case["tokens"])], vocab_size=VOCAB_SIZE)
    return small_trainer(name, tokens, run, world=world, fields=CONFIGS[name][fields], **{**case["options"], **more})


def poisoned(case: dict[str, Any], run: Path, world: World | None = None, **more: Any) -> Trainer:
    """The same with what is to go wrong, by the poison among its tokens."""
    trainer = trainer_of(case, run, world, **more)
    plant(trainer.learner, case["kind"])
    return trainer


def stop_and_skip(case: dict[str, Any], folder: Path, world: World) -> dict[str, Any]:
    """Train so that it stops; then so that it skips; then that again, cut right after the first skipped update.

    That one is of the steps from `first` to `cut`. late: the first looks as on a GPU, only when figures are logged or
    a checkpoint is due. Returns what the first said, and all that the second came to.
    """
    stopping = poisoned(case, folder / "stop", world)
    if case["late"]:
        stopping.learner.finite.looks_at_once = lambda: False
    _, stopped = train(stopping)

    skipping = poisoned(case, folder / "skip", world, on_nonfinite="skip")
    with mock.patch.object(nonfinite, "reset_rows", wraps=nonfinite.reset_rows) as resetting:
        printed, error = train(skipping)
    assert not error, error
    masks = [call.args[2] for call in resetting.call_args_list]
    reset = [[world.rank * len(rows) + row for row in rows.nonzero()[:, 0].tolist()] for rows in masks]
    steps = [int(step) for step in re.findall(r"step (\d+) is skipped", printed)]

    whole = everything(skipping)
    train(poisoned(case, folder / "parts", world, on_nonfinite="skip", max_steps=case["cut"]))
    torch.manual_seed(99)
    rest = poisoned(case, folder / "parts", world, on_nonfinite="skip")
    assert (rest.learner.step, rest.learner.finite.skipped) == (case["cut"], case["cut"] - case["first"])
    train(rest)
    assert_bitwise_equal(everything(rest), whole)
    skipped = (skipping.learner.finite.skipped, skipping.learner.finite.consecutive_skips)
    return {"stopped": stopped, "steps": steps, "reset": reset, "printed": printed, "skipped": skipped, **whole}


def give_up(case: dict[str, Any], folder: Path, world: World) -> dict[str, Any]:
    """Skip while losses, or weights, are bad on the rank `rank` from the step `at` on; return how it ended."""
    trainer = trainer_of(case, folder / "give_up", world, on_nonfinite="skip", max_skipped=case["limit"])
    learner = trainer.learner
    update, nll = learner.update, learner.model.head.nll
    bad_rank, at = case["rank"] == world.rank, case["at"]

    def update_with_bad_weights() -> Any:
        if bad_rank and learner.step == at:
            parameter = next(iter(learner.module.parameters())).data
            getattr(parameter, "_local_tensor", parameter).fill_(math.nan)
        return update()

    def bad_nll(hidden: Tensor, targets: Tensor) -> Tensor:
        return nll(hidden, targets) * (math.inf if bad_rank and learner.step >= at else 1)

    if case["kind"] == "weights":
        learner.update = update_with_bad_weights
    else:
        learner.model.head.nll = bad_nll
    printed, error = train(trainer)
    num_said = printed.count("is skipped")
    return {"error": error, "num_skipped": learner.finite.skipped, "num_said": num_said, "step": learner.step}


def check_given_up(case: dict[str, Any], ranks: list[dict[str, Any]], folder: Path) -> None:
    """Check that every rank gave up for the right reason, that the first said so, and that good weights are saved."""
    num_skipped = 0 if case["kind"] == "weights" else case["limit"]
    at = case["at"] + num_skipped
    why = "the weights are not finite" if case["kind"] == "weights" else f"train.max_skipped is {case['limit']}"
    for of in ranks:
        assert f"not finite at step {at}," in of["error"] and why in of["error"], (case, of)
        assert (of["num_skipped"], of["step"]) == (num_skipped, at), (case, of)
    assert ranks[0]["num_said"] == num_skipped, (case, ranks[0])
    kept = checkpoint.newest(folder / "give_up")
    assert kept is not None and kept.step == at, (case, kept)
    check_finite(kept)


def check_finite(kept: Checkpoint | None) -> None:
    """Check that the weights of a checkpoint, if there is one, are finite."""
    assert kept is None or all(torch.isfinite(value).all() for value in kept.model_weights().values()), kept


def _case(folder: Path, source: random.Random, *, name: str, kind: str, mode: str) -> int:
    utterance, position = poisoned_tokens(folder / "shard", source)
    case = {"model": (name, next(iter(CONFIGS[name]))), "kind": kind, "tokens": folder / "shard", "late": False}
    case["options"] = {"state": mode, "max_steps": _STEPS, "decay_steps": _STEPS, "evaluate_tokens": 0}
    case["options"] |= {"checkpoint_every": 1, "keep_checkpoints": 2 * _STEPS}
    reference = trainer_of(case, folder / "reference")
    bad = bad_steps(reference.learner, utterance, position, kind, steps=_STEPS)
    if not bad:
        return 0
    expected, first = _reference(reference, bad, kind), min(bad)
    came_to = stop_and_skip(case | {"first": first, "cut": first + 1}, folder, World())

    # stop: it says in which step and row, and keeps the last good checkpoint.
    stopped, printed = came_to["stopped"], came_to["printed"]
    assert f"not finite at step {first}," in stopped, (stopped, bad)
    assert kind == "gradient" or (f"row {bad[first][0]} " in stopped and utterance in stopped), (stopped, bad)
    kept = checkpoint.newest(folder / "stop")
    assert (kept.step if kept else 0) == first and (kept is None) == ("none was saved yet" in stopped), stopped
    check_finite(kept)

    # skip: exactly as if the step's update had not been made.
    assert_bitwise_equal({what: came_to[what] for what in expected}, expected)
    assert came_to["steps"] == sorted(bad) and came_to["skipped"][0] == len(bad), printed
    assert kind == "gradient" or utterance in printed, printed
    return len(bad)


@fault("loss that is not finite", short=9, long=200)
def _bad_loss(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Must hold: training stops, names step, row and utterance, and keeps the last good checkpoint; or it skips exactly
    that step's update, and resumes bit for bit.
    """
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


@fault("loss or weights not finite for good", short=4, long=50)
def _bad_for_good(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Must hold: skipping ends at once if the weights are bad, else after train.max_skipped steps; bad weights are
    never saved.
    """
    poisoned_tokens(folder / "shard", source)
    case: dict[str, Any] = {"model": ("compressive_transformer", "conv"), "tokens": folder / "shard", "rank": 0}
    case["options"] = {"max_steps": 50, "checkpoint_every": 1}
    for number in range(cases):
        case["kind"] = "losses" if number % 2 else "weights"
        case |= {"at": source.randrange(1, 5), "limit": source.randrange(1, 5)}
        check_given_up(case, [give_up(case, folder / str(number), World())], folder / str(number))
    return {}
