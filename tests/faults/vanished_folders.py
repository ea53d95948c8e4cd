"""Folders that vanish, change or become read-only during a command: refused with the reason, or without effect."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults import forks, forkserver
from tests.faults.calling import call, must_work
from tests.faults.disks import SmallDisk, read_only
from tests.faults.fault import fault
from tests.faults.full_disk import check_checkpoints, weights, without_locks
from tests.faults.small_runs import SETTINGS, restored
from waveform.cli import main
from waveform.engine import evaluator
from waveform.engine.learner import Learner


def _at_step(step: int, action: Callable[[], None]) -> None:
    """Make `action` happen once, when training is at `step`, or at that window of an evaluation."""
    score_once, pending = evaluator.score_once, [action]

    def reach(at: int) -> None:
        if at == step and pending:
            pending.pop()()

    def scoring(*arguments: Any, **options: Any) -> Any:
        for i, window in enumerate(score_once(*arguments, **options)):
            reach(i)
            yield window

    forks.before(Learner, "update", lambda learner: reach(learner.step))
    evaluator.score_once = scoring


_CHANGES = ("run removed", "run renamed", "run replaced", "disk read-only", "data removed", "data replaced",
            "shards touched", "shards cut", "shards overwritten")  # fmt: skip


def _changed(what: str, run: Path, data: Path, disk: SmallDisk) -> Iterator[str | None]:
    """Change a run's folders; yield what must then be printed (None: the command continues); undo it.

    Data that is then missing will be copied again.
    """
    aside, shards = run.with_name("put aside"), sorted((data / "shards").iterdir())
    if what == "disk read-only" and disk.kind != "tmpfs":
        what = "run removed"
    match what:
        case "run removed":
            shutil.rmtree(run)
            yield f"{run} is gone"
        case "run renamed":
            run.rename(aside)
            yield f"{run} is gone"
            aside.rename(run)
        case "run replaced":
            run.rename(aside)
            run.mkdir()
            yield f"{run} is another folder now"
            assert not list(run.iterdir()), "something was written into another folder"
            run.rmdir()
            aside.rename(run)
        case "disk read-only":
            with read_only(run):
                yield "the file system is read-only"
        case "data removed":
            shutil.rmtree(data)
            yield None
        case "data replaced":
            data.rename(aside)
            data.mkdir()
            yield None
            data.rmdir()
        case "shards touched":
            for shard in shards:
                os.utime(shard)
            yield None
        case "shards cut":
            for shard in shards:
                os.truncate(shard, 100)
            yield "was cut short while it was in use"
            shutil.rmtree(data)
        case "shards overwritten":
            for shard in shards:
                with open(shard, "r+b") as file:
                    for place in range(64, 664, 100):  # of its tokens
                        file.seek(place)
                        file.write(b"overwritten")
            yield "is damaged (the checksum of"
            shutil.rmtree(data)


def _during(place: Path, disk_dir: Path, what: str, verb: str, step: int) -> None:
    disk = SmallDisk(disk_dir, pages=None)
    disk.grow()
    run, data = disk_dir / "run", disk_dir / "data"
    shutil.copytree(place / "data", data)
    arguments = ["train", data, run, *SETTINGS]
    if verb == "evaluate":
        shutil.copytree(place / "run", run)
        config = run / "config.yaml"
        config.write_text(config.read_text().replace(str((place / "data").resolve()), str(data)))
        arguments = ["evaluate", run, "--device", "cpu", "--json", run.with_name("figures.json")]
    before, change, must_say = without_locks(data), _changed(what, run, data, disk), []
    _at_step(step, lambda: must_say.append(next(change)))
    code, _, printed = call(main, arguments)
    (said,) = must_say
    if said is None or (verb == "evaluate" and what.startswith(("run", "disk"))):  # it has been read already
        assert code == 0, printed
    else:
        assert code == 2 and said in printed.splitlines()[-1] and "Traceback" not in printed, printed
    next(change, None)
    if not data.exists():
        shutil.copytree(place / "data", data)
    assert without_locks(data) == before
    if verb == "train":
        check_checkpoints(run)
        must_work(main, arguments)
        assert weights(run) == weights(place / "run")
    print(json.dumps({"refused": said is not None}))


@fault("folders vanish or change under a run", short=10, long=200)
def _vanished(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Must hold: refused with the reason, nothing written elsewhere; once put back, the same command ends bit for bit
    as usual; data deleted or replaced as a whole is read to the end.
    """
    place, num_refused = restored("speech"), 0
    for case in range(cases):
        what, where = _CHANGES[case % len(_CHANGES)], folder / f"disk_{case}"
        verb, step = ("train", source.randrange(4)) if case < 0.8 * cases else ("evaluate", 1)
        printed = forkserver.run(_during, place, where, what, verb, step, output=folder / f"{case}.txt")
        num_refused += json.loads(printed.splitlines()[-1])["refused"]
    return {"refused": num_refused, "went_on": cases - num_refused}
