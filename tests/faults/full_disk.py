"""A disk that fills up at any write of any verb: one line, exit code 2, and the same command then continues."""

import errno
import itertools
import json
import os
import random
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from recipes.cli import main as recipes
from tests.content import content
from tests.faults import forkserver
from tests.faults.calling import call, must_work
from tests.faults.disks import PAGE, SmallDisk
from tests.faults.fault import fault
from tests.faults.small_runs import SETTINGS, SUBWORDS, TEXT_SETTINGS, WAVENET, restored
from waveform.cli import main as waveform
from waveform.engine import checkpoint

_Command = tuple[Callable[[Sequence[str]], int], list[str | Path]]


def without_locks(folder: Path) -> dict[str, bytes | None]:
    """Return the content of `folder` except for its locks."""
    return {name: held for name, held in content(folder).items() if not name.endswith("lock")}


def weights(run: Path) -> tuple[int, bytes]:
    """Return the newest checkpoint's step and weights."""
    found = checkpoint.newest(run)
    assert found is not None
    return found.step, (found.folder / "model.safetensors").read_bytes()


def _command(verb: str, place: Path, folder: Path) -> _Command:
    """A command that reads a run or its data in `place` and writes into `folder`."""
    is_text = place.name == "text"
    training = ["preset=smoke", *TEXT_SETTINGS] if is_text else [*SETTINGS, "train.sample_seconds=0.01"]
    source = ["folder", place / "texts"] if is_text else [place / "audio"]
    run = [place / "run", "--device", "cpu"]
    figures = ["--json", folder / ("figures.json" if verb == "bench" else "out/figures.json")]
    arguments = {
        "train": [place / "data", folder / "run", *training],
        "prepare": [*source, folder / "data", *(SUBWORDS if is_text else ())],
        "sample": [*run, "--out", folder / "out", "--seconds", "0.3", "--num", "2"],
        "evaluate": [*run, *figures],
        "compare": [*run, *figures],
        "sweep": [*run, "--compressed", "8,16", *figures],
        # If only one page is left, the first write fits and the second fails.
        "analyse": [*run, "--tokens", "500", "--context-step", "64", "--plot", folder / "out/figures.png", *figures],
        "bench": ["--model", "wavenet", "--preset", "small", *WAVENET, "--audio-minutes", "0", *figures],
    }
    return recipes if is_text else waveform, [verb, *arguments[verb]]


def _size(folder: Path) -> tuple[int, int]:
    """Return how many pages and inodes the files of `folder` take."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(-(-path.stat().st_size // PAGE) for path in files), len(list(folder.rglob("*"))) + 2


def _on_small_disk(place: Path, folder: Path, pages: int | None, inodes: int | None, verb: str) -> None:
    """Run a command and print figures; if it fails, it must leave nothing unusable, and work with more space."""
    disk, (main, arguments) = SmallDisk(folder, pages=pages, inodes=inodes), _command(verb, place, folder)
    code, _, printed = call(main, arguments)
    print(json.dumps({"kind": disk.kind, "failed": code != 0}))
    if code != 0:
        lines = [line for line in printed.splitlines() if "cannot write" in line]
        assert code == 2 and len(lines) == 1 and lines[0] == printed.splitlines()[-1], f"exit code {code}\n{printed}"
        assert disk.reason in lines[0] and "Traceback" not in printed, printed
        _check_left(folder)
        disk.grow()
        again = must_work(main, arguments).err
        assert "warning" not in again, again
    _check_left(folder)
    if verb == "train":
        assert weights(folder / "run") == weights(place / "run")
    elif verb == "prepare":
        assert without_locks(folder / "data") == without_locks(place / "data")
        assert {path.name for path in folder.iterdir()} == {"data"}, "something was left behind"
    elif verb != "sample":
        (figures,) = folder.rglob("figures.json")
        json.loads(figures.read_text())


def _check_left(folder: Path) -> None:
    assert not list(folder.rglob("*.partial")), list(folder.rglob("*.partial"))
    check_checkpoints(folder / "run")
    for path in folder.glob("out/*.wav"):
        with wave.open(str(path)) as file:
            assert len(file.readframes(file.getnframes())) == 2 * file.getnframes(), path


def _on_failing_disk(place: Path, folder: Path, failing: int) -> None:
    """The disk fails (EIO) at the `failing`-th fsync of a training."""
    run, (main, arguments) = folder / "run", _command("train", place, folder)
    fsync, count = os.fsync, itertools.count(1)

    def fail(descriptor: int) -> None:
        if next(count) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with mock.patch.object(os, "fsync", fail):
        code, _, printed = call(main, arguments)
    last = printed.splitlines()[-1]
    failed = next(count) > failing
    assert (code == 1) == failed, (code, printed)
    if failed:
        assert "cannot write" in last and "input/output error" in last and "Traceback" not in printed, printed
        check_checkpoints(run)
        must_work(main, arguments)
    assert weights(run) == weights(place / "run")
    print(json.dumps({"kind": "failing", "failed": failed}))


def check_checkpoints(run: Path) -> None:
    """Check that every folder called a checkpoint is whole, and that no part of one is left."""
    for folder in (run / "checkpoints").glob("step_*"):
        assert checkpoint._open(folder).step in (2, 4)
    assert not list(run.glob("checkpoints/.*")), list(run.glob("checkpoints/.*"))


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
    speech, text, is_long = restored("speech"), restored("text"), cases >= 100
    plan: list[tuple[Any, ...]] = []
    for verb, place, name, part in (("train", speech, "run", 0.4), ("prepare", speech, "data", 0.2),
                                    ("train", text, "run", 0.1), ("prepare", text, "data", 0.1)):  # fmt: skip
        pages, inodes = _size(place / name)
        count = max(3, round(cases * part))
        plan += [(_on_small_disk, place, n, None, verb) for n in _spread(pages, count - count // 3, source)]
        plan += [(_on_small_disk, place, None, n, verb) for n in _spread(inodes, count // 3, source)]
    plan += [(_on_small_disk, speech, n, None, "sample") for n in _spread(9, max(2, cases // 10), source)]
    plan += [(_on_small_disk, speech, None, 2, "sample")]
    plan += [(_on_failing_disk, speech, n) for n in _spread(15, max(2, cases // 10), source)]
    for verb in ("evaluate", "compare", "analyse", "sweep", *(["bench"] if is_long else [])):
        place = text if verb == "sweep" else speech
        plan += [(_on_small_disk, place, n, None, verb) for n in ((1, 2, 4) if is_long else (1,))]
        plan += [(_on_small_disk, place, None, n, verb) for n in ((1, 2, 3, 4) if is_long else ())]
    num_failed, kinds = 0, set()
    for i, (function, place, *arguments) in enumerate(plan):
        log = folder / f"case_{i}.txt"
        printed = forkserver.run(function, place, folder / f"disk_{i}", *arguments, output=log)
        figures = json.loads(printed.splitlines()[-1])
        num_failed += figures["failed"]
        kinds.add(figures["kind"])
    assert num_failed > len(plan) // 2, f"only {num_failed} of {len(plan)} disks were full"
    return {"commands": len(plan), "failed_and_mended": num_failed, "disk": sorted(kinds)}
