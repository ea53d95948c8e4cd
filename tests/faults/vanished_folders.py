"""Folders that vanish, change or become read-only during a command: refused with the reason, or without effect."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults import forkserver
from tests.faults.calling import call
from tests.faults.disks import SmallDisk, cover_read_only, uncover
from tests.faults.fault import fault
from tests.faults.full_disk import check_checkpoints, weights, without_locks
from tests.faults.small_runs import SETTINGS, restored
from waveform.cli import main
from waveform.engine import evaluator
from waveform.engine.learner import Learner


def _at_step(step: int, action: Callable[[], None]) -> None:
    """Make `action` happen once, when training is at `step`, or at that window of an evaluation."""
    update, score_once, done = Learner.update, evaluator.score_once, []

    def acting(learner: Learner) -> Any:
        if learner.step == step and not done:
            done.append(True)
            action()
        return update(learner)

    def scoring(*arguments: Any, **options: Any) -> Any:
        for i, window in enumerate(score_once(*arguments, **options)):
            if i == step and not done:
                done.append(True)
                action()
            yield window

    Learner.update = acting
    evaluator.score_once = scoring


# What happens to a run's folders: each yields what must then be printed (None: the command continues), and is undone;
# data that it removes is copied again.
_Change = Iterator[str | None]


def _shards(data: Path) -> list[Path]:
    return sorted((data / "shards").iterdir())


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name} put aside")


def run_removed(run: Path, data: Path, disk: SmallDisk) -> _Change:
    shutil.rmtree(run)
    yield f"{run} is gone"


def run_renamed(run: Path, data: Path, disk: SmallDisk) -> _Change:
    run.rename(_aside(run))
    yield f"{run} is gone"
    _aside(run).rename(run)


def run_replaced(run: Path, data: Path, disk: SmallDisk) -> _Change:
    run.rename(_aside(run))
    run.mkdir()
    yield f"{run} is another folder now"
    assert not list(run.iterdir()), "something was written into another folder"
    run.rmdir()
    _aside(run).rename(run)


def disk_read_only(run: Path, data: Path, disk: SmallDisk) -> _Change:
    if disk.kind != "tmpfs":
        yield from run_removed(run, data, disk)
        return
    cover_read_only(run)
    yield "the file system is read-only"
    uncover(run)


def data_removed(run: Path, data: Path, disk: SmallDisk) -> _Change:
    shutil.rmtree(data)
    yield None


def data_replaced(run: Path, data: Path, disk: SmallDisk) -> _Change:
    data.rename(_aside(data))
    data.mkdir()
    yield None
    data.rmdir()


def shards_touched(run: Path, data: Path, disk: SmallDisk) -> _Change:
    for shard in _shards(data):
        os.utime(shard)
    yield None


def shards_cut(run: Path, data: Path, disk: SmallDisk) -> _Change:
    for shard in _shards(data):
        os.truncate(shard, 100)
    yield "was cut short while it was in use"
    shutil.rmtree(data)


def shards_overwritten(run: Path, data: Path, disk: SmallDisk) -> _Change:
    for shard in _shards(data):
        with open(shard, "r+b") as file:
            for place in range(64, 664, 100):  # of its tokens
                file.seek(place)
                file.write(b"overwritten")
    yield "is damaged (the checksum of"
    shutil.rmtree(data)


_CHANGES = (run_removed, run_renamed, run_replaced, disk_read_only, data_removed, data_replaced, shards_touched,
            shards_cut, shards_overwritten)  # fmt: skip


def _during(
    place: Path, disk_dir: Path, make: Callable[[Path, Path, SmallDisk], _Change], verb: str, step: int
) -> None:
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
    before, change, must_say = without_locks(data), make(run, data, disk), []
    _at_step(step, lambda: must_say.append(next(change)))
    code, _, printed = call(main, arguments)
    (said,) = must_say
    if said is None or (verb == "evaluate" and make.__name__.startswith(("run", "disk"))):  # it has been read already
        assert code == 0, printed
    else:
        assert code == 2 and said in printed.splitlines()[-1] and "Traceback" not in printed, printed
    next(change, None)
    if not data.exists():
        shutil.copytree(place / "data", data)
    assert without_locks(data) == before
    if verb == "train":
        check_checkpoints(run)
        code, _, again = call(main, arguments)
        assert code == 0, again
        assert weights(run) == weights(place / "run")
    print(json.dumps({"refused": said is not None}))


@fault("folders vanish or change under a run", short=10, long=200)
def _vanished(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Must hold: refused with the reason, nothing written elsewhere; once put back, the same command ends bit for bit
    as usual; data deleted or replaced as a whole is read to the end.
    """
    place, num_refused = restored("speech"), 0
    for case in range(cases):
        make, where = _CHANGES[case % len(_CHANGES)], folder / f"disk_{case}"
        verb, step = ("train", source.randrange(4)) if case < 0.8 * cases else ("evaluate", 1)
        printed = forkserver.run(_during, place, where, make, verb, step, output=folder / f"{case}.txt")
        num_refused += json.loads(printed.splitlines()[-1])["refused"]
    return {"refused": num_refused, "went_on": cases - num_refused}
