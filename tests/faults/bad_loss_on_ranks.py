"""Losses, states and gradients that are not finite on one of two ranks: both stop or skip, as one process does."""

import contextlib
import io
import itertools
import random
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.engine.test_trainer import assert_bitwise_equal, everything
from tests.faults import bad_loss
from tests.faults.calling import call
from tests.faults.fault import fault
from tests.faults.small_runs import SETTINGS, write_audio
from tests.laws import CONFIGS
from tests.ranks.run_ranks import run_ranks
from waveform.cli import main
from waveform.engine import checkpoint, token_learner
from waveform.ranks.distributed import World

_ROWS, _STEPS = 4, 6
_OPTIONS = {
    **{"dtype": torch.float64, "batch_size": _ROWS, "max_steps": _STEPS, "decay_steps": _STEPS},
    **{"keep_checkpoints": 2 * _STEPS, "evaluate_tokens": 0, "update_period_from": 4},
}
_MODELS = [
    ("compressive_transformer", "conv-ragged"),
    ("transformer_xl", "pre"),
    ("wavenet", next(iter(CONFIGS["wavenet"]))),
    ("compressive_transformer", "conv-no-loss"),  # BPTT
    ("compressive_transformer", "dilated-autoencode-post"),
]


def _command(folder: Path, *, rank: int, bad_rank: int) -> tuple[int | None, str]:
    """Run `waveform train`, with a loss that is not finite in one rank's second step; return exit code and stderr."""
    usual, windows = token_learner.score_window, itertools.count()  # two in each step

    def scored(*arguments: Any, **options: Any) -> Any:
        scores = usual(*arguments, **options)
        return scores._replace(nll=scores.nll * torch.inf) if next(windows) == 2 and rank == bad_rank else scores

    token_learner.score_window = scored
    code, _, printed = call(main, ["train", folder / "audio", folder / "run", *SETTINGS, "train.checkpoint_every=1"])
    return code, printed


def _rank(cases: list[dict[str, Any]], bad_rank: int, world: World, folder: Path) -> None:
    """Do all cases in turn as one rank: one that falls out of step spoils the next case."""
    for i, case in enumerate(cases):
        does = bad_loss.give_up if "limit" in case else bad_loss.stop_and_skip
        torch.save(does(case, folder / f"case_{i}", world), folder / f"case_{i}_{world.rank}.pt")
    torch.save(_command(folder, rank=world.rank, bad_rank=bad_rank), folder / f"command_{world.rank}.pt")


def _plan(folder: Path, num: int, source: random.Random) -> list[dict[str, Any]]:
    """Plan cases of every kind, with and without sharding, each of which meets its poison."""
    kinds = [(kind, how) for how in ("none", "fsdp") for kind in (*bad_loss.KINDS, "losses", "weights")]
    cases, attempts = [], itertools.count()
    while len(cases) < num:
        kind, how = kinds[(len(cases) * 7) % len(kinds)]  # 7: so that even a few cases have both ways of sharding
        name, fields = source.choice(_MODELS)
        if kind == "state" and name == "wavenet":
            name, fields = _MODELS[0]  # WaveNet embeds by a convolution
        shard = folder / f"tokens_{next(attempts)}"
        utterance, position = bad_loss.poisoned_tokens(shard, source)
        case: dict[str, Any] = {"model": (name, fields), "kind": kind, "tokens": shard, "utterance": utterance}
        case["late"] = source.random() < 0.3
        case["options"] = {
            **_OPTIONS,
            "state": source.choice(["utterance", "carry", "chunk"]),
            "sharding": how,
            "checkpoint_every": source.randrange(2, 5),
            "log_every": source.randrange(1, 4),
            "update_period": source.choice([1, 1, 2]),
            "unroll": 2 if fields == "conv-no-loss" else 1,
        }
        if kind in bad_loss.KINDS:
            one = bad_loss.trainer_of(case, folder / "planning")
            case["bad"] = bad_loss.bad_steps(one.learner, utterance, position, kind, steps=_STEPS)
            if not case["bad"]:
                continue
            case["first"] = min(_updates(case))
            case["cut"] = dict(_all_updates(case))[case["first"]]
        else:
            case |= {"limit": source.randrange(1, 4), "at": source.randrange(1, 4), "rank": source.randrange(2)}
            case["options"] |= {"update_period": 1, "checkpoint_every": 1}
        cases.append(case)
    return cases


def _all_updates(case: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the steps before and after each update of a case."""
    found, options = [(0, 0)], case["options"]
    while (at := found[-1][1]) < _STEPS:
        found.append((at, at + (options["update_period"] if at >= options["update_period_from"] else 1)))
    return found[1:]


def _updates(case: dict[str, Any]) -> dict[int, list[int]]:
    """Return a case's updates that contain bad steps, by the step before each, with their bad rows."""
    bad = case["bad"]
    rows = {at: {row for step in range(at, after) for row in bad.get(step, ())} for at, after in _all_updates(case)}
    return {at: sorted(of) for at, of in rows.items() if of}


def _last_saved(case: dict[str, Any], step: int) -> int:
    """Return the step of the last checkpoint of a run that came to `step`."""
    every = case["options"]["checkpoint_every"]
    return max((after for at, after in _all_updates(case) if after <= step and after // every > at // every), default=0)


def _check(case: dict[str, Any], ranks: list[dict[str, Any]], alone: dict[str, Any], folder: Path) -> int:
    """Check that two ranks did what one process does; return how many updates were skipped."""
    bad, name, each, first = _updates(case), f"{case}", _ROWS // 2, case["first"]
    kept = checkpoint.newest(folder / "stop")
    assert (kept.step if kept else 0) == _last_saved(case, first), (name, kept)
    bad_loss.check_finite(kept)
    named: set[int] = set()
    for rank, of in enumerate(ranks):
        assert f"not finite at step {first}," in of["stopped"], (name, of["stopped"])
        assert ("none was saved yet" in of["stopped"]) == (kept is None), (name, of["stopped"])
        named |= (rows := {int(row) for row in re.findall(r"row (\d+) \(", of["stopped"])})
        assert all(row // each == rank for row in rows), (name, of["stopped"])
        assert not rows or case["utterance"] in of["stopped"], (name, of["stopped"])
    if case["kind"] == "gradient":
        assert not named and not any(any(rows) for of in ranks for rows in of["reset"]), name
    else:
        assert named == set(bad[first]), (name, [of["stopped"] for of in ranks])
        together = [sorted(a + b) for a, b in zip(*(of["reset"] for of in ranks), strict=True)]
        assert together == [bad[step] for step in sorted(bad)], (name, together, bad)
    assert ranks[0]["steps"] == alone["steps"] == sorted(bad), (name, [of["steps"] for of in ranks], bad)
    assert alone["printed"].count("is skipped") == len(bad)

    figures = ("step", "skipped", "cursor")
    for what in ("weights", "optimiser", *figures):
        assert_bitwise_equal(ranks[0][what], ranks[1][what])
    state = [torch.cat(parts) for parts in zip(*(of["state"] for of in ranks), strict=True)]
    assert [ranks[0][what] for what in figures] == [alone[what] for what in figures], name
    for found, expected in ((ranks[0]["weights"], alone["weights"]), (state, alone["state"])):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")

    # One process continues from what two saved right after the skipped step.
    one = folder / "one"
    later = [f"step_{step:08d}" for step in range(case["cut"] + 1, _STEPS + 1)]
    shutil.copytree(folder / "parts", one, ignore=shutil.ignore_patterns(*later))
    with contextlib.redirect_stderr(io.StringIO()):  # rows are divided anew
        resumed = bad_loss.poisoned(case, one, on_nonfinite="skip")
    assert resumed.learner.step == case["cut"] and resumed.learner.finite.skipped > 0, name
    bad_loss.train(resumed)
    torch.testing.assert_close(everything(resumed)["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
    return len(bad)


@fault("loss that is not finite on one rank of two", short=3, long=60)
def _bad_loss_on_ranks(folder: Path, num: int, source: random.Random) -> dict[str, Any]:
    """Must hold: both ranks stop, or skip, at the same step, with and without sharding; the rank that read it names row
    and utterance; the weights stay equal and are those of one process; a resumed job equals an uncut one bit for bit.
    """
    cases = _plan(folder, num, source)
    job = folder / "job"
    job.mkdir()
    write_audio(job / "audio")
    bad_rank = source.randrange(2)
    run_ranks(partial(_rank, cases, bad_rank), 2, job, timeout_s=20, patience_s=60 + 10 * len(cases))
    skipped = 0
    for i, case in enumerate(cases):
        came_to = [torch.load(job / f"case_{i}_{rank}.pt", weights_only=True) for rank in range(2)]
        if "bad" in case:
            alone = bad_loss.stop_and_skip(case, folder / f"alone_{i}", World())
            skipped += _check(case, came_to, alone, job / f"case_{i}")
        else:
            bad_loss.check_given_up(case, came_to, job / f"case_{i}")
    for rank in range(2):
        code, printed = torch.load(job / f"command_{rank}.pt", weights_only=True)
        last = printed.splitlines()[-1]
        assert code == 2 and last.startswith("waveform train: the loss or a gradient is"), (code, printed)
        assert "Traceback" not in printed, printed
        assert "not finite at step 1," in last and "Last good checkpoint: step 1 in " in last, printed
        assert (f"in row {rank} (tokens " in last) == (rank == bad_rank), printed
    return {"jobs": len(cases), "skipped_updates": skipped}
