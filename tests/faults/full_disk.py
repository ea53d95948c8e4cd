"""A disk that fills up at any write of any verb: one line, exit code 2, and the same command then continues."""

import errno
import hashlib
import itertools
import json
import os
import random
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.cli import main as recipes
from tests.content import content
from tests.faults import forkserver
from tests.faults.calling import call
from tests.faults.disks import PAGE, SmallDisk
from tests.faults.fault import fault
from tests.faults.small_runs import SETTINGS, SUBWORDS, TEXT_SETTINGS, restored
from waveform.cli import main as waveform
from waveform.engine import checkpoint

_Command = tuple[Callable[[Sequence[str]], int], list[str | Path]]


def without_locks(folder: Path) -> dict[str, bytes | None]:
    """Return the content of `folder` except for its locks."""
    return {name: held for name, held in content(folder).items() if not name.endswith("lock")}


def weights(run: Path) -> str:
    """Return a digest of the newest checkpoint's weights, with its step."""
    found = checkpoint.newest(run)
    assert found is not None
    return hashlib.blake2b((found.folder / "model.safetensors").read_bytes()).hexdigest() + f" of step {found.step}"


def _training(place: Path, run: Path) -> _Command:
    if place.name == "text":
        return recipes, ["train", place / "data", run, "preset=smoke", *TEXT_SETTINGS]
    return waveform, ["train", place / "data", run, *SETTINGS, "train.sample_seconds=0.01"]


def _preparation(place: Path, data: Path) -> _Command:
    if place.name == "text":
        return recipes, ["prepare", "folder", place / "texts", data, *SUBWORDS]
    return waveform, ["prepare", place / "audio", data]


def _size(folder: Path) -> tuple[int, int]:
    """Return how many pages and inodes the files of `folder` take."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(-(-path.stat().st_size // PAGE) for path in files), len(list(folder.rglob("*"))) + 2


def _on_small_disk(disk: SmallDisk, command: _Command, *, check: Callable[[], None] = lambda: None) -> None:
    """Run a command and print figures; if it fails, `check` must hold, and with more space the command must work."""
    main, arguments = command
    code, _, printed = call(main, arguments)
    print(json.dumps({"kind": disk.kind, "failed": code != 0, "last_line": printed.strip().splitlines()[-1:]}))
    if code == 0:
        return
    lines = [line for line in printed.splitlines() if "cannot write" in line]
    assert code == 2 and len(lines) == 1 and lines[0] == printed.splitlines()[-1], f"exit code {code}\n{printed}"
    assert disk.reason in lines[0] and "Traceback" not in printed, printed
    check()
    assert not list(disk.folder.rglob("*.partial")), list(disk.folder.rglob("*.partial"))
    disk.grow()
    code, _, again = call(main, arguments)
    assert code == 0 and "warning" not in again, again


def _train(place: Path, disk_dir: Path, pages: int | None, inodes: int | None) -> None:
    disk, run = SmallDisk(disk_dir, pages=pages, inodes=inodes), disk_dir / "run"
    _on_small_disk(disk, _training(place, run), check=lambda: check_checkpoints(run))
    assert weights(run) == weights(place / "run"), f"{weights(run)} is not {weights(place / 'run')}"
    assert not list(run.rglob("*.partial")), list(run.rglob("*.partial"))


def _train_on_failing_disk(place: Path, run: Path, failing: int) -> None:
    """The disk fails (EIO) at the `failing`-th fsync."""
    main, arguments = _training(place, run)
    fsync, count = os.fsync, itertools.count(1)

    def fail(descriptor: int) -> None:
        if next(count) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    os.fsync = fail
    code, _, printed = call(main, arguments)
    os.fsync = fsync
    last = printed.splitlines()[-1]
    failed = next(count) > failing
    assert (code == 1) == failed, (code, printed)
    if failed:
        assert "cannot write" in last and "input/output error" in last and "Traceback" not in printed, printed
        check_checkpoints(run)
        code, _, again = call(main, arguments)
        assert code == 0, again
    assert weights(run) == weights(place / "run")
    print(json.dumps({"kind": "failing", "failed": failed, "last_line": [last]}))


def check_checkpoints(run: Path) -> None:
    """Check that every folder called a checkpoint is whole, and that no part of one is left."""
    for folder in (run / "checkpoints").glob("step_*"):
        assert checkpoint._open(folder).step in (2, 4)
    assert not list(run.glob("checkpoints/.*")), list(run.glob("checkpoints/.*"))


def _prepare(place: Path, disk_dir: Path, pages: int | None, inodes: int | None) -> None:
    disk, data = SmallDisk(disk_dir, pages=pages, inodes=inodes), disk_dir / "data"
    _on_small_disk(disk, _preparation(place, data))
    assert without_locks(data) == without_locks(place / "data")
    assert {path.name for path in disk_dir.iterdir()} == {"data"}, "something was left behind"


def _sample(place: Path, disk_dir: Path, pages: int | None, inodes: int | None) -> None:
    disk, out = SmallDisk(disk_dir, pages=pages, inodes=inodes), disk_dir / "out"

    def check() -> None:
        for path in out.glob("*.wav"):
            with wave.open(str(path)) as file:
                assert len(file.readframes(file.getnframes())) == 2 * file.getnframes(), path

    arguments: list[str | Path] = ["sample", place / "run", "--out", out, "--seconds", "0.3", "--num", "2"]
    _on_small_disk(disk, (waveform, [*arguments, "--device", "cpu"]), check=check)
    check()


def _report(place: Path, disk_dir: Path, pages: int | None, inodes: int | None, verb: str) -> None:
    disk = SmallDisk(disk_dir, pages=pages, inodes=inodes)
    main, arguments = waveform, [verb, place / "run"]
    if verb == "sweep":
        main, arguments = recipes, [*arguments, "--compressed", "8,16"]
    if verb == "analyse":
        arguments += ["--tokens", "500", "--context-step", "64", "--plot", disk_dir / "out/figures.png"]
    if verb == "bench":
        arguments = [verb, "--model", "wavenet", "--preset", "small", "model.num_stacks=1", "model.layers_per_stack=2"]
        arguments += ["model.residual_channels=8", "model.gate_channels=8", "model.skip_channels=8"]
        arguments += ["--audio-minutes", "0"]
    if verb != "bench":
        arguments += ["--device", "cpu"]
    # If only one page is left, the first write fits and the second fails.
    json_file = disk_dir / ("figures.json" if verb == "bench" else "out/figures.json")
    _on_small_disk(disk, (main, [*arguments, "--json", json_file]))
    json.loads(json_file.read_text())
    assert not list(disk_dir.rglob("*.partial"))


def _spread(highest: int, count: int, source: random.Random) -> list[int]:
    """Draw `count` whole numbers from 1 to `highest`, one from each of as many equal parts."""
    edges = [1 + i * highest // count for i in range(count + 1)]
    return [source.randrange(a, max(b, a + 1)) for a, b in itertools.pairwise(edges)]


@fault("disk full", short=10, long=150)
def _full_disk(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    """Must hold: one line names the file, exit code 2; every checkpoint is whole and no part of one is left; with more
    space the same command ends bit for bit as usual; WAVs written so far can be opened; the same if the disk fails,
    with exit code 1.
    """
    speech, text = restored("speech"), restored("text")
    plan: list[tuple[Any, ...]] = []
    for function, place, name, part in (
        (_train, speech, "run", 0.4),
        (_prepare, speech, "data", 0.2),
        (_train, text, "run", 0.1),
        (_prepare, text, "data", 0.1),
    ):
        pages, inodes = _size(place / name)
        count = max(3, round(cases * part))
        plan += [(function, place, n, None) for n in _spread(pages, count - count // 3, source)]
        plan += [(function, place, None, n) for n in _spread(inodes, count // 3, source)]
    plan += [(_sample, speech, n, None) for n in _spread(9, max(2, cases // 10), source)]
    plan += [(_sample, speech, None, 2)]
    plan += [(_train_on_failing_disk, speech, n) for n in _spread(15, max(2, cases // 10), source)]
    verbs = ("evaluate", "compare", "analyse", "sweep", "bench")[: 5 if cases >= 100 else 4]
    places = {"sweep": text}
    for verb in verbs:
        plan += [(_report, places.get(verb, speech), n, None, verb) for n in ((1, 2, 4) if cases >= 100 else (1,))]
        plan += [(_report, places.get(verb, speech), None, n, verb) for n in ((1, 2, 3, 4) if cases >= 100 else ())]
    num_failed, kinds, lines = 0, set(), set()
    for i, (function, *arguments) in enumerate(plan):
        disk = folder / f"disk_{i}"
        printed = forkserver.run(function, arguments[0], disk, *arguments[1:], output=folder / f"case_{i}.txt")
        figures = json.loads(printed.splitlines()[-1])
        num_failed += figures["failed"]
        kinds.add(figures["kind"])
        if figures["failed"]:
            lines.add(figures["last_line"][0].replace(str(disk), "DISK"))
    assert num_failed > len(plan) // 2, f"only {num_failed} of {len(plan)} disks were full"
    return {"commands": len(plan), "failed_and_mended": num_failed, "disk": sorted(kinds), "messages": len(lines)}
