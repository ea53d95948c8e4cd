"""Folders that vanish, change or become read-only during a command: refused with the reason, or without effect."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import forkserver
from tests.faults.calling import call
from tests.faults.disks import SmallDisk, cover_read_only, uncover
from tests.faults.fault import fault
from tests.faults.full_disk import check_checkpoints, digests, weights
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


def _shards(data: Path) -> list[Path]:
    return sorted((data / "shards").iterdir())


class _Change:
    """What happens to a run's folders, how to undo it, and what must be printed (None: the command continues)."""

    def __init__(self, run: Path, data: Path, disk: SmallDisk) -> None:
        self.run, self.data, self.disk = run, data, disk

    def run_removed(self) -> str:
        shutil.rmtree(self.run)
        return f"{self.run} is gone"

    def run_renamed(self) -> str:
        self.run.rename(self.run.with_name("moved"))
        return f"{self.run} is gone"

    def undo_run_renamed(self) -> None:
        self.run.with_name("moved").rename(self.run)

    def run_replaced(self) -> str:
        self.run_renamed()
        self.run.mkdir()
        return f"{self.run} is another folder now"

    def undo_run_replaced(self) -> None:
        assert not list(self.run.iterdir()), "something was written into another folder"
        self.run.rmdir()
        self.undo_run_renamed()

    def disk_read_only(self) -> str:
        if self.disk.kind != "tmpfs":
            return self.run_removed()
        cover_read_only(self.run)
        return "the file system is read-only"

    def undo_disk_read_only(self) -> None:
        if self.disk.kind == "tmpfs":
            uncover(self.run)

    def data_removed(self) -> None:
        shutil.copytree(self.data, self.data.with_name("copy"))
        shutil.rmtree(self.data)

    def undo_data_removed(self) -> None:
        self.data.with_name("copy").rename(self.data)

    def data_replaced(self) -> None:
        self.data.rename(self.data.with_name("copy"))
        self.data.mkdir()

    def undo_data_replaced(self) -> None:
        self.data.rmdir()
        self.undo_data_removed()

    def shards_touched(self) -> None:
        for shard in _shards(self.data):
            os.utime(shard)

    def shards_cut(self) -> str:
        shutil.copytree(self.data, self.data.with_name("copy"))
        for shard in _shards(self.data):
            os.truncate(shard, 100)
        return "was cut short while it was in use"

    def undo_shards_cut(self) -> None:
        shutil.rmtree(self.data)
        self.undo_data_removed()

    def shards_overwritten(self) -> str:
        shutil.copytree(self.data, self.data.with_name("copy"))
        for shard in _shards(self.data):
            with open(shard, "r+b") as file:
                for place in range(64, 664, 100):  # of its tokens
                    file.seek(place)
                    file.write(b"overwritten")
        return "is damaged (the checksum of"

    undo_shards_overwritten = undo_shards_cut


_CHANGES = ("run_removed", "run_renamed", "run_replaced", "disk_read_only", "data_removed", "data_replaced",
            "shards_touched", "shards_cut", "shards_overwritten")  # fmt: skip


def _during_training(place: Path, disk_dir: Path, name: str, step: int) -> None:
    disk = SmallDisk(disk_dir, pages=None)
    disk.grow()
    run, data = disk_dir / "run", disk_dir / "data"
    shutil.copytree(place / "data", data)
    change, must_say = _Change(run, data, disk), []
    _at_step(step, lambda: must_say.append(getattr(change, name)()))
    arguments = ["train", data, run, *SETTINGS]
    code, _, printed = call(main, arguments)
    assert len(must_say) == 1
    if must_say[0] is None:
        assert code == 0, printed
    else:
        last = printed.splitlines()[-1]
        assert code == 2 and must_say[0] in last and "Traceback" not in printed, printed
    getattr(change, f"undo_{name}", lambda: None)()
    check_checkpoints(run)
    code, _, again = call(main, arguments)
    assert code == 0, again
    assert weights(run) == weights(place / "run")
    print(json.dumps({"refused": must_say[0] is not None}))


def _during_evaluation(place: Path, disk_dir: Path, name: str, window: int) -> None:
    disk = SmallDisk(disk_dir, pages=None)
    disk.grow()
    run, data = disk_dir / "run", disk_dir / "data"
    shutil.copytree(place / "data", data)
    shutil.copytree(place / "run", run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str((place / "data").resolve()), str(data)))
    before, must_say = digests(data), []
    change = _Change(run, data, disk)
    _at_step(window, lambda: must_say.append(getattr(change, name)()))
    code, _, printed = call(main, ["evaluate", run, "--device", "cpu", "--json", run.with_name(f"{name}.json")])
    assert len(must_say) == 1
    if must_say[0] is None or name.startswith(("run", "disk")):  # the run has been read already
        assert code == 0, printed
    else:
        assert code == 2 and must_say[0] in printed.splitlines()[-1] and "Traceback" not in printed, printed
    getattr(change, f"undo_{name}", lambda: None)()
    assert digests(data) == before
    print(json.dumps({"refused": must_say[0] is not None}))


@fault(
    "folders vanish or change under a run",
    "refused with the reason, nothing written elsewhere; once put back, the same command ends bit for bit as usual; "
    "data deleted or replaced as a whole is read to the end",
    short=10,
    long=200,
)
def _vanished(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    place, num_refused = restored("speech"), 0
    for case in range(cases):
        name = _CHANGES[case % len(_CHANGES)]
        where = folder / f"disk_{case}"
        function, step = (_during_training, source.randrange(4)) if case < 0.8 * cases else (_during_evaluation, 1)
        printed = forkserver.run(function, place, where, name, step, output=folder / f"{case}.txt")
        num_refused += json.loads(printed.splitlines()[-1])["refused"]
    return {"refused": num_refused, "went_on": cases - num_refused}
