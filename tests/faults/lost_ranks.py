"""One of two ranks is killed, stops or loops in any phase: the other ends in time with a line; a restart continues."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import waveform.verbs.evaluate
from recipes.cli import main as text_main
from tests.faults import forks, forkserver
from tests.faults.calling import call, must_work
from tests.faults.fault import fault
from tests.faults.full_disk import weights
from tests.faults.small_runs import SETTINGS, TEXT_SETTINGS, write_audio, write_texts
from tests.ranks.run_ranks import command_on_ranks
from waveform.cli import main
from waveform.engine import checkpoint, evaluator
from waveform.engine.token_learner import TokenLearner
from waveform.engine.trainer import Trainer
from waveform.ranks import distributed
from waveform.ranks.distributed import World
from waveform.speech import data

_TIMEOUT_S = 4.0
_PATIENCE_S = 10.0  # for the first rank at a barrier, instead of two hours
_SLACK_S = 8.0  # for a busy machine, and for leaving
_PHASES = ("step", "checkpoint", "evaluation", "drawing", "last barrier", "preparing")
_FIRST_ALONE = ("drawing", "preparing")
# Commands: `waveform train`, `recipes train`, and `recipes evaluate` of what that trained.
_AUDIO, _TEXT, _EVALUATE = "audio", "text", "evaluate"
_LOOP, _SLEEP = "LOOP", "SLEEP"  # only the main thread; other threads of the process continue
_LAST_BARRIER = 2 * 3 + 2  # three in each of two checkpoints, and two evaluations


class _Plan(NamedTuple):
    """What a rank does to itself."""

    command: str
    phase: str
    how: str  # name of a signal, LOOP or SLEEP
    count: int  # at which call it fails

    @property
    def is_first_alone(self) -> bool:
        """Whether only the first rank has work in this phase, and still runs: to the others it may well be working."""
        return self.how in (_LOOP, _SLEEP) and self.phase in _FIRST_ALONE

    def fail(self) -> None:
        if self.how == _LOOP:
            os.nice(19)  # this thread: other tests run meanwhile
            while True:
                pass
        if self.how == _SLEEP:
            time.sleep(10**6)
        os.kill(os.getpid(), signal.Signals[self.how])


def _plant(plan: _Plan, failing: Path) -> None:
    """Have this process fail as planned; it makes the file `failing` first."""
    count = plan.count
    where: dict[str, tuple[Any, str, int]] = {
        "step": (TokenLearner, "reduce_gradients", count),
        "checkpoint": (checkpoint, "_write_tensors", 1),
        "evaluation": (evaluator.Tally, "result", 1 if plan.command == _EVALUATE else 1 + count % 2),
        "drawing": (Trainer, "_report", 1 + count % 2),
        "last barrier": (World, "barrier", _LAST_BARRIER + (plan.command == _AUDIO)),  # one after preparing
        "preparing": (data, "prepare", 1),
    }
    owner, name, at = where[plan.phase]
    calls = itertools.count(1)

    def fail_once(*_: Any) -> None:
        if next(calls) == at:
            failing.touch()
            plan.fail()

    forks.before(owner, name, fail_once)


def _arguments(command: str, place: Path, run: Path) -> list[str | Path]:
    timeout = f"train.timeout_s={_TIMEOUT_S}"
    return {
        _AUDIO: ["train", place / "audio", run, *SETTINGS, timeout],
        _TEXT: ["train", place / "text_data", run, "preset=smoke", *TEXT_SETTINGS, timeout],
        _EVALUATE: ["evaluate", run, "--json", run.with_suffix(".json"), "--device", "cpu"],
    }[command]


def _rank(rank: int, port: int, place: Path, run: Path, lost: int, plan: _Plan, folder: Path) -> None:
    """One rank of a job whose rank `lost` fails."""
    if plan.is_first_alone:
        distributed._PATIENCE = timedelta(seconds=_PATIENCE_S)
    forks.become_rank(rank, of=2, port=port)
    if rank == lost:
        _plant(plan, folder / "failing")
    waveform.verbs.evaluate.SCORING_TIMEOUT_S = _TIMEOUT_S  # for which there is no setting
    code, _, lines = call(main if plan.command == _AUDIO else text_main, _arguments(plan.command, place, run))
    (folder / f"answer_{rank}.json").write_text(json.dumps([code, lines]))
    os._exit(0)  # without what gloo's threads do at an interpreter's end, which does not matter here


def _job(folder: Path, place: Path, run: Path, lost: int, plan: _Plan) -> list[Any]:
    """Run two ranks, of which `lost` fails; return exit code and stderr of the other, which ended by itself in time."""
    port, failing, other = forks.free_port(), folder / "failing", 1 - lost
    folder.mkdir()
    shared, logs = (port, place, run, lost, plan, folder), [folder / f"rank_{rank}.txt" for rank in range(2)]
    ranks = [forkserver.start(_rank, rank, *shared, output=log) for rank, log in enumerate(logs)]
    try:
        ranks[other].join(60)
        ended = time.time()
        assert failing.exists(), f"nothing failed: {[file.read_text() for file in folder.glob('answer_*')]}"
        took = ended - failing.stat().st_mtime
        limit_s = _PATIENCE_S if plan.is_first_alone else _TIMEOUT_S
        assert took < limit_s + _SLACK_S, f"rank {other} took {took:.1f} s to end, or hung"
        assert not plan.is_first_alone or took > limit_s - 1, f"rank {other} gave up the first one after {took:.1f} s"
    finally:  # one that loops does not react to SIGTERM
        for process in ranks:
            process.kill()
            process.join()
    return json.loads((folder / f"answer_{other}.json").read_text())


def _undisturbed(folder: Path, command: str, place: Path, run: Path) -> Any:
    """Run a job to its end; return what it made."""
    command_on_ranks("waveform" if command == _AUDIO else "recipes", _arguments(command, place, run), folder)
    if command != _EVALUATE:
        return weights(run)
    figures = json.loads(run.with_suffix(".json").read_text())
    return {name: value for name, value in figures.items() if name != "run"}


def _kinds() -> list[tuple[str, str, str]]:
    """Return command, phase and how the rank fails; the first ones are those of the test suite."""
    kinds = [(_AUDIO, "checkpoint", "SIGSTOP"), (_AUDIO, "step", _LOOP), (_TEXT, "step", _LOOP)]
    kinds += [(_AUDIO, phase, how) for how in ("SIGKILL", "SIGSTOP") for phase in _PHASES]
    for how in ("SIGKILL", "SIGSTOP"):
        kinds += [(_TEXT, phase, how) for phase in ("step", "checkpoint", "evaluation", "last barrier")]
        kinds += [(_EVALUATE, "evaluation", how)]
    kinds += [(_TEXT, "checkpoint", _LOOP), (_AUDIO, "last barrier", _LOOP)]
    kinds += [(_AUDIO, phase, _SLEEP) for phase in ("step", "evaluation")]
    kinds += [(_AUDIO, "drawing", _LOOP), (_TEXT, "drawing", _SLEEP)]
    return list(dict.fromkeys(kinds))


@fault("a rank dies or hangs", short=2, long=30)
def _lost(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Must hold: the other ends within train.timeout_s and a few seconds, with a line and exit code 1; a restart ends
    bit for bit.
    """
    place, whole = folder / "place", folder / "runs"
    kinds, expected = (_kinds() * cases)[:cases], {}
    write_audio(place / "audio")
    needed = {command for command, _, _ in kinds}
    if needed != {_AUDIO}:
        write_texts(place / "text")
        must_work(text_main, ["prepare", "folder", place / "text", place / "text_data"])
        needed.add(_TEXT)
    for command in sorted(needed, key=(_AUDIO, _TEXT, _EVALUATE).index):
        run = whole / (_AUDIO if command == _AUDIO else _TEXT)
        expected[command] = _undisturbed(folder / f"whole_{command}", command, place, run)
    for case, (command, phase, how) in enumerate(kinds):
        rank = 0 if phase in _FIRST_ALONE else source.randrange(2)
        # In these phases the others wait for the first rank.
        if how in (_LOOP, _SLEEP) and phase in ("checkpoint", "last barrier"):
            rank = 1
        place_of_case = folder / f"case_{case}"
        run = place_of_case / "runs" / "run"
        run.parent.mkdir(parents=True)
        if phase != "preparing":
            for prepared in whole.glob("*.prepared"):
                shutil.copytree(prepared, run.parent / prepared.name)
        if command == _EVALUATE:
            shutil.copytree(whole / _TEXT, run)
        plan = _Plan(command, phase, how, source.randrange(1, 5))
        print(f"rank {rank}, {plan}")
        code, printed = _job(place_of_case / "failing", place, run, rank, plan)
        last = printed.splitlines()[-1]
        assert code == 1 and "Traceback" not in printed and f"rank {1 - rank} stops" in last, (code, printed)
        why = "worked alone for 0:00:10 and may hang" if plan.is_first_alone else f"did not answer for {_TIMEOUT_S:g} s"
        if how == "SIGKILL":  # a rank that waits at a barrier for a killed one learns of it only by its silence
            why = "ended; its own output says why" if "its own output" in last else "did not answer"
        assert why in last, printed
        assert _undisturbed(place_of_case / "again", command, place, run) == expected[command]
    return {"timeout_s": _TIMEOUT_S}
