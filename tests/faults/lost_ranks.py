"""A rank of two is killed or stopped at any phase: the other ends in time with a line, and a restart goes on."""

import itertools
import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import forked
from tests.faults.fault import Fault
from tests.faults.full_disk import SETTINGS, SPLIT, weights, write_audio
from waveform.cli import main
from waveform.engine import checkpoint, evaluator
from waveform.engine.distributed import World
from waveform.engine.trainer import Trainer

_TIMEOUT_S = 4.0
_SLACK_S = 8.0  # on a busy machine, and to leave
_PHASES = ("step", "checkpoint", "evaluation", "drawing", "last barrier", "preparing")
_FIRST_ALONE = ("drawing", "preparing")


def _before(owner: Any, name: str, count: int, action: Callable[[], None]) -> None:
    """Have `action` happen before the `count`-th call of a function."""
    function, calls = getattr(owner, name), itertools.count(1)

    def acting(*arguments: Any, **options: Any) -> Any:
        if next(calls) == count:
            action()
        return function(*arguments, **options)

    setattr(owner, name, acting)


def _plant(phase: str, action: Callable[[], None], count: int) -> None:
    import waveform.run
    import waveform.training

    where: dict[str, tuple[Any, str, int]] = {
        "step": (Trainer, "reduce_gradients", count),
        "checkpoint": (checkpoint, "_write_tensors", count),
        "evaluation": (evaluator.Tally, "result", 1 + count % 2),
        "drawing": (Trainer, "_report", 1 + count % 2),
        "last barrier": (World, "barrier", _LAST_BARRIER),
        "preparing": (waveform.run, "prepare", 1),
    }
    _before(*where[phase], action)


_LAST_BARRIER = 1 + 3 * 3 + 2  # after preparing, three in each of three checkpoints, and two evaluations; the last one


def _rank(rank: int, port: int, place: Path, run: Path, plan: tuple[str, int, int] | None, said: Path) -> None:
    """One rank of a job; `plan`: phase, signal that it sends itself there, and at which call."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)

    if plan is not None:
        phase, number, count = plan

        def fail() -> None:
            said.with_suffix(".failing").touch()
            os.kill(os.getpid(), number)

        _plant(phase, fail, count)
    arguments = ["train", place / "audio", "--run", run, *SETTINGS, *SPLIT, f"train.timeout_s={_TIMEOUT_S}"]
    code, lines = forked.command(main, arguments)
    said.write_text(json.dumps({"code": code, "said": lines}))
    os._exit(0)  # what gloo's threads do at the end of an interpreter is no matter here


def _job(folder: Path, place: Path, run: Path, plans: dict[int, tuple[str, int, int]]) -> dict[int, tuple[int, str]]:
    """Run both ranks; the exit code and stderr of each that ended by itself. A stopped one is killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    files = {rank: folder / f"rank_{rank}.json" for rank in range(2)}
    ranks = {
        rank: forked.start(
            _rank, rank, port, place, run, plans.get(rank), files[rank], output=folder / f"rank_{rank}.txt"
        )
        for rank in range(2)
    }
    for rank in sorted(ranks, key=lambda rank: rank in plans):
        if rank in plans:
            failing = files[rank].with_suffix(".failing")
            assert failing.exists(), f"nothing failed: {[file.read_text() for file in files.values() if file.exists()]}"
            ranks[rank].kill()
        ranks[rank].join(60)
        if plans and rank not in plans:
            failing = files[1 - rank].with_suffix(".failing")
            took = time.time() - failing.stat().st_mtime if failing.exists() else 0
            assert took < _TIMEOUT_S + _SLACK_S, f"rank {rank} took {took:.1f} s to end, or hung"
    for process in ranks.values():
        if process.is_alive():
            process.kill()
    return {
        rank: (told["code"], told["said"])
        for rank, file in files.items()
        if rank not in plans and (told := json.loads(file.read_text()))
    }


def _lost(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    place = folder / "place"
    place.mkdir()
    write_audio(place / "audio")
    whole = _job(folder / "whole", place, folder / "runs" / "whole", {})
    assert all(code == 0 for code, _ in whole.values()), whole
    expected = weights(folder / "runs" / "whole")
    kinds = [(phase, number) for number in (signal.SIGSTOP, signal.SIGKILL) for phase in _PHASES]
    seconds = []
    for case in range(cases):
        phase, number = kinds[case % len(kinds)]
        rank = 0 if phase in _FIRST_ALONE else source.randrange(2)
        place_of_case = folder / f"case_{case}"
        run = place_of_case / "runs" / "run"
        run.parent.mkdir(parents=True)
        if phase != "preparing":
            for prepared in (folder / "runs").glob("*.prepared"):
                shutil.copytree(prepared, run.parent / prepared.name)
        began = time.monotonic()
        plan = (phase, int(number), 1 if phase == "checkpoint" else source.randrange(1, 5))
        left = _job(place_of_case / "failing", place, run, {rank: plan})
        seconds.append(time.monotonic() - began)
        ((code, said),) = left.values()
        last = said.splitlines()[-1]
        why = f"did not answer for {_TIMEOUT_S:g} s" if number == signal.SIGSTOP else "ended; its own output says why"
        name = f"{number.name} of rank {rank} at {plan}"
        assert code == 1 and "Traceback" not in said, f"{name}: {code} {said}"
        # Who waits at a barrier for one that was killed learns of it by its silence.
        assert f"rank {1 - rank} stops" in last, f"{name}: {said}"
        assert why in last or (number == signal.SIGKILL and "did not answer" in last), f"{name}: {said}"
        again = _job(place_of_case / "again", place, run, {})
        assert all(code == 0 for code, _ in again.values()), f"{name}: {again}"
        assert weights(run) == expected, name
    return {"most_seconds_of_a_failing_job": round(max(seconds), 1), "timeout_s": _TIMEOUT_S}


FAULTS = [
    Fault(
        "a rank dies or hangs",
        "the other ends within train.timeout_s and a few seconds, with a line and exit code 1; a restart ends bitwise",
        _lost,
        short=2,
        long=24,
    ),
]
