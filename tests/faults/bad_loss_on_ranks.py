"""Losses, states and gradients that are not finite on one of two ranks: both stop or skip, as one process does."""

import contextlib
import io
import itertools
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.engine.test_trainer import assert_bitwise_equal, everything
from tests.engine.training import small_trainer
from tests.faults import forks, forkserver
from tests.faults.bad_loss import KINDS, bad_steps, plant, poisoned_tokens, say
from tests.faults.calling import call
from tests.faults.fault import fault
from tests.faults.small_runs import SETTINGS, write_audio
from tests.laws import CONFIGS, VOCAB_SIZE
from waveform.cli import main
from waveform.engine import checkpoint, nonfinite, token_learner
from waveform.engine.nonfinite import Diverged
from waveform.engine.shards import Shard
from waveform.engine.token_set import TokenSet
from waveform.engine.trainer import Trainer
from waveform.ranks import distributed
from waveform.ranks.distributed import World

_ROWS, _STEPS = 4, 6
_MODELS = [
    ("compressive_transformer", "conv-ragged"),
    ("transformer_xl", "pre"),
    ("wavenet", next(iter(CONFIGS["wavenet"]))),
    ("compressive_transformer", "conv-no-loss"),  # BPTT
    ("compressive_transformer", "dilated-autoencode-post"),
]


def _trainer(case: dict[str, Any], run: Path, world: World | None = None, **more: Any) -> Trainer:
    """A trainer of a case, with its poison."""
    name, fields = case["model"]
    made = small_trainer(
        name,
        TokenSet([Shard(case["tokens"])], vocab_size=VOCAB_SIZE),
        run,
        world=world,
        fields=CONFIGS[name][fields],
        dtype=torch.float64,
        **{**case["options"], **more},
    )
    plant(made.learner, case["kind"])
    return made


def _run(trainer: Trainer) -> tuple[str, str]:
    """Train; return what was printed and the error that ended it, if any."""
    errors: list[str] = []

    def run() -> None:
        try:
            trainer.run()
        except Diverged as error:
            errors.append(str(error))

    printed = say(run)
    return printed, "".join(errors)


def _try(case: dict[str, Any], folder: Path, world: World) -> dict[str, Any]:
    """Do all that a case asks for, on one of two ranks or, for comparison, on one process."""
    stopping = _trainer(case, folder / "stop", world)
    if case["late"]:  # as on a GPU, which looks only when figures are logged or a checkpoint is due
        stopping.learner.finite.looks_at_once = lambda: False
    _, stopped = _run(stopping)

    reset: list[list[int]] = []
    usual = nonfinite.reset_rows

    def noting(state: Any, fresh: Any, rows: torch.Tensor) -> Any:
        reset.append([world.rank * _ROWS // world.size + row for row in rows.nonzero()[:, 0].tolist()])
        return usual(state, fresh, rows)

    nonfinite.reset_rows = noting
    skipping = _trainer(case, folder / "skip", world, on_nonfinite="skip")
    printed, error = _run(skipping)
    nonfinite.reset_rows = usual
    assert not error, error
    steps = [int(step) for step in re.findall(r"step (\d+) is skipped", printed)]

    # Cut right after a skipped step, then continued.
    whole = everything(skipping)
    _run(_trainer(case, folder / "parts", world, on_nonfinite="skip", max_steps=case["cut"]))
    torch.manual_seed(99)
    rest = _trainer(case, folder / "parts", world, on_nonfinite="skip")
    assert (rest.learner.step, rest.learner.finite.skipped > 0) == (case["cut"], True), rest.learner.step
    _run(rest)
    assert_bitwise_equal(everything(rest), whole)
    finite = skipping.learner.finite
    skipped = (finite.skipped, finite.consecutive_skips)
    return {"stopped": stopped, "steps": steps, "reset": reset, "printed": printed, "skipped": skipped, **whole}


def _give_up(case: dict[str, Any], folder: Path, world: World) -> dict[str, Any]:
    """Train with losses, or weights, that are bad for good on one rank."""
    trainer = _trainer(case, folder / "give_up", world, on_nonfinite="skip", max_skipped=case["limit"])
    learner = trainer.learner
    update, nll = learner.update, learner.model.head.nll
    bad_rank, at = case["rank"] == world.rank, case["at"]

    def update_with_bad_weights() -> Any:
        if bad_rank and learner.step == at:
            parameter = next(iter(learner.module.parameters())).data
            getattr(parameter, "_local_tensor", parameter).fill_(torch.nan)
        return update()

    if case["kind"] == "weights":
        learner.update = update_with_bad_weights
    else:
        learner.model.head.nll = lambda h, t: nll(h, t) * (torch.inf if bad_rank and learner.step >= at else 1)
    printed, error = _run(trainer)
    return {"error": error, "num_skipped": learner.finite.skipped, "step": learner.step, "printed": printed}


def _command(folder: Path, *, rank: int, bad_rank: int) -> tuple[int | None, str]:
    """Run `waveform train`, with a loss that is not finite in one rank's second step; return exit code and stderr."""
    usual, windows = token_learner.score_window, itertools.count()  # two in each step

    def scored(*arguments: Any, **options: Any) -> Any:
        scores = usual(*arguments, **options)
        return scores._replace(nll=scores.nll * torch.inf) if next(windows) == 2 and rank == bad_rank else scores

    token_learner.score_window = scored
    arguments = ["train", folder / "audio", folder / "run", *SETTINGS, "train.checkpoint_every=1"]
    outcome = call(main, arguments)
    return outcome.code, outcome.err


def _rank(rank: int, ports: list[int], folder: Path, cases: list[dict[str, Any]], bad_rank: int) -> None:
    """One rank of a job that does all cases in turn: a rank that falls out of step spoils the next case."""
    forks.become_rank(rank, of=2, port=ports[0])
    with distributed.job(device="cpu", timeout_s=20) as world:
        for i, case in enumerate(cases):
            does = _give_up if "limit" in case else _try
            torch.save(does(case, folder / f"case_{i}", world), folder / f"case_{i}_{rank}.pt")
    os.environ["MASTER_PORT"] = str(ports[1])
    torch.save(_command(folder, rank=rank, bad_rank=bad_rank), folder / f"command_{rank}.pt")
    os._exit(0)


def _plan(folder: Path, num: int, source: random.Random) -> list[dict[str, Any]]:
    """Plan cases of every kind, with and without sharding, each of which meets its poison."""
    kinds = [(kind, how) for how in ("none", "fsdp") for kind in (*KINDS, "losses", "weights")]
    cases: list[dict[str, Any]] = []
    for attempt in itertools.count():
        if len(cases) == num:
            return cases
        kind, how = kinds[(len(cases) * 7) % len(kinds)]  # 7: so that even a few cases have both ways of sharding
        name, fields = source.choice(_MODELS)
        if kind == "state" and name == "wavenet":
            name, fields = _MODELS[0]  # WaveNet embeds by a convolution
        shard = folder / f"tokens_{attempt}"
        _, utterance, position = poisoned_tokens(shard, source)
        case: dict[str, Any] = {"model": (name, fields), "kind": kind, "tokens": shard, "utterance": utterance}
        case["late"] = source.random() < 0.3
        case["options"] = {
            "state": source.choice(["utterance", "carry", "chunk"]),
            "sharding": how,
            "batch_size": _ROWS,
            "max_steps": _STEPS,
            "checkpoint_every": source.randrange(2, 5),
            "log_every": source.randrange(1, 4),
            "keep_checkpoints": 2 * _STEPS,
            "evaluate_tokens": 0,
            "decay_steps": _STEPS,
            "update_period": source.choice([1, 1, 2]),
            "update_period_from": 4,
            "unroll": 2 if fields == "conv-no-loss" else 1,
        }
        if kind in KINDS:
            one = _trainer(case, folder / "planning")
            case["bad"] = bad_steps(one.learner, utterance, position, kind, steps=_STEPS)
            if not case["bad"]:
                continue
            case["cut"] = _next_update(case["options"], min(_updates(case)))  # right after the first bad update
        else:
            case |= {"limit": source.randrange(1, 4), "at": source.randrange(1, 4), "rank": source.randrange(2)}
            case["options"] |= {"update_period": 1, "checkpoint_every": 1}
        cases.append(case)
    raise AssertionError


def _next_update(options: dict[str, Any], step: int) -> int:
    return step + (options["update_period"] if step >= options["update_period_from"] else 1)


def _updates(case: dict[str, Any]) -> dict[int, list[int]]:
    """Return a case's updates that contain bad steps, by the step before each, with their bad rows."""
    found: dict[int, list[int]] = {}
    step = 0
    while step < _STEPS:
        after = _next_update(case["options"], step)
        rows = sorted({row for each in range(step, after) for row in case["bad"].get(each, ())})
        if rows:
            found[step] = rows
        step = after
    return found


def _last_saved(case: dict[str, Any], step: int) -> int:
    """Return the step of the last checkpoint of a run that came to `step`."""
    at = saved = 0
    while at < step:
        after, every = _next_update(case["options"], at), case["options"]["checkpoint_every"]
        saved = after if after // every > at // every else saved
        at = after
    return saved


def _check(case: dict[str, Any], ranks: list[dict[str, Any]], alone: dict[str, Any], folder: Path) -> int:
    """Check that two ranks did what one process does; return how many updates were skipped."""
    bad, name, each = _updates(case), f"{case}", _ROWS // 2
    first = min(bad)
    kept = checkpoint.newest(folder / "stop")
    assert (kept.step if kept else 0) == _last_saved(case, first), (name, kept)
    assert kept is None or all(torch.isfinite(value).all() for value in kept.model_weights().values()), name
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
        assert_bitwise_equal(ranks[0][what], ranks[1][what], f"{name} {what}")
    state = [torch.cat(parts) for parts in zip(*(of["state"] for of in ranks), strict=True)]
    assert [ranks[0][what] for what in figures] == [alone[what] for what in figures], name
    for found, expected in ((ranks[0]["weights"], alone["weights"]), (state, alone["state"])):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")

    # One process continues from what two saved right after the skipped step.
    one = folder / "one"
    shutil.copytree(folder / "parts", one)
    for later in (one / "checkpoints").glob("step_*"):
        if int(later.name.removeprefix("step_")) > case["cut"]:
            shutil.rmtree(later)
    with contextlib.redirect_stderr(io.StringIO()):  # rows are dealt anew
        resumed = _trainer(case, one, on_nonfinite="skip")
    assert resumed.learner.step == case["cut"] and resumed.learner.finite.skipped > 0, name
    _run(resumed)
    torch.testing.assert_close(everything(resumed)["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
    return len(bad)


def _check_given_up(case: dict[str, Any], ranks: list[dict[str, Any]], folder: Path) -> None:
    num_skipped = 0 if case["kind"] == "weights" else case["limit"]
    at = case["at"] + num_skipped
    why = "the weights are not finite" if case["kind"] == "weights" else f"train.max_skipped is {case['limit']}"
    for of in ranks:
        assert f"not finite at step {at}," in of["error"] and why in of["error"], (case, of)
        assert (of["num_skipped"], of["step"]) == (num_skipped, at), (case, of)
    kept = checkpoint.newest(folder / "give_up")
    assert kept is not None and kept.step == at, (case, kept)
    assert all(torch.isfinite(value).all() for value in kept.model_weights().values()), case


@fault(
    "loss that is not finite on one rank of two",
    "both ranks stop, or skip, at the same step, with and without sharding; the rank that read it names row and "
    "utterance; the weights stay equal and are those of one process; a resumed job equals an uncut one bit for bit",
    short=3,
    long=60,
)
def _bad_loss_on_ranks(folder: Path, num: int, source: random.Random) -> dict[str, Any]:
    cases = _plan(folder, num, source)
    job = folder / "job"
    job.mkdir()
    write_audio(job / "audio")
    ports = [forks.free_port() for _ in range(2)]
    bad_rank = source.randrange(2)
    ranks = [
        forkserver.start(_rank, rank, ports, job, cases, bad_rank, output=job / f"rank_{rank}.txt") for rank in range(2)
    ]
    alone = [_try(case, folder / f"alone_{i}", World()) if "bad" in case else {} for i, case in enumerate(cases)]
    for rank, process in enumerate(ranks):
        process.join(60 + 10 * len(cases))
        if process.exitcode != 0:
            for each in ranks:
                each.kill()
            raise AssertionError(f"rank {rank}: {process.exitcode}: {(job / f'rank_{rank}.txt').read_text()}")
    skipped = 0
    for i, case in enumerate(cases):
        came_to = [torch.load(job / f"case_{i}_{rank}.pt", weights_only=True) for rank in range(2)]
        if "bad" in case:
            skipped += _check(case, came_to, alone[i], job / f"case_{i}")
        else:
            _check_given_up(case, came_to, job / f"case_{i}")
    for rank in range(2):
        code, printed = torch.load(job / f"command_{rank}.pt", weights_only=True)
        last = printed.splitlines()[-1]
        assert code == 2 and last.startswith("waveform train: the loss or a gradient is"), (code, printed)
        assert "Traceback" not in printed, printed
        assert "not finite at step 1," in last and "Last good checkpoint: step 1 in " in last, printed
        assert (f"in row {rank} (tokens " in last) == (rank == bad_rank), printed
    return {"jobs": len(cases), "skipped_updates": skipped}
