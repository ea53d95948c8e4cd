"""A disk that fills up at any write of any verb: one line, exit code 2, and the same command then continues."""

import errno
import hashlib
import itertools
import json
import os
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from recipes.cli import main as text_main
from tests.faults import forkserver
from tests.faults.calling import call
from tests.faults.disks import PAGE, SmallDisk
from tests.faults.fault import fault
from waveform.cli import main
from waveform.engine import checkpoint

_MODEL = "num_layers=1 d_model=16 num_heads=2 d_feedforward=16 window=64 memory=64 compressed=16"
_TRAIN = ("max_steps=6 batch_size=2 chunk=64 evaluate_every=3 checkpoint_every=2 log_every=1 "
          "device=cpu evaluate_tokens=2000")  # fmt: skip
TEXT_SETTINGS = [f"model.{s}" for s in _MODEL.split()] + [f"train.{s}" for s in _TRAIN.split()]
SETTINGS = [*TEXT_SETTINGS, "train.sample_seconds=0.01"]
SPLIT = ["data.split.valid=0.25", "data.split.test=0.25"]


def write_audio(folder: Path) -> Path:
    """Write a few tones; return their folder."""
    folder.mkdir()
    for i in range(8):
        phase = 2 * np.pi * (150 + 40 * i) * np.arange(4800) / 24_000
        soundfile.write(folder / f"tone_{i}.wav", 0.4 * np.sin(phase), 24_000)
    return folder


def write_text(folder: Path) -> Path:
    """Write a few documents; return their folder."""
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text("to be or not to be, that is the question. " * 40)
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file in `folder` except locks."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.endswith("lock")]
    return {str(p.relative_to(folder)): hashlib.blake2b(p.read_bytes()).hexdigest() for p in files}


def weights(run: Path) -> str:
    """Return a digest of the newest checkpoint's weights, with its step."""
    found = checkpoint.newest(run)
    assert found is not None
    return hashlib.blake2b((found.folder / "model.safetensors").read_bytes()).hexdigest() + f" of step {found.step}"


def _make(place: Path) -> None:
    """Make audio, text, data sets and finished runs on a disk with enough space: what the others must come to."""
    audio = write_audio(place / "audio")
    text = write_text(place / "text")
    for arguments in (
        ["prepare", audio, place / "data", *SPLIT],
        ["train", place / "data", place / "run", *SETTINGS],
    ):
        code, _, printed = call(main, arguments)
        assert code == 0, printed
    code, _, printed = call(text_main, ["prepare", "folder", text, place / "text_data"])
    assert code == 0, printed
    code, _, printed = call(text_main, ["train", *_text(place, place / "text_run")])
    assert code == 0, printed


def _text(place: Path, run: Path) -> list[str | Path]:
    return ["folder", place / "text_data", run, "preset=smoke", *TEXT_SETTINGS]


def _size(folder: Path) -> tuple[int, int]:
    """Return how many pages and inodes the files of `folder` take."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(-(-path.stat().st_size // PAGE) for path in files), len(list(folder.rglob("*"))) + 2


def _train(place: Path, disk_dir: Path, pages: int | None, inodes: int | None, text: bool) -> None:
    disk = SmallDisk(disk_dir, pages=pages, inodes=inodes)
    run, expected = disk_dir / "run", weights(place / ("text_run" if text else "run"))
    entry, arguments = (main, [place / "data", run, *SETTINGS]) if not text else (text_main, _text(place, run))
    arguments = ["train", *arguments]
    code, _, printed = call(entry, arguments)
    failed = code != 0
    if failed:
        _check_line(code, printed, disk)
        _check_checkpoints(run)
        disk.grow()
        code, _, again = call(entry, arguments)
        assert code == 0, again
        assert "warning" not in again, again
    assert weights(run) == expected, f"{weights(run)} is not {expected}"
    assert not list(run.rglob("*.partial")), list(run.rglob("*.partial"))
    print(json.dumps({"kind": disk.kind, "failed": failed, "last_line": printed.strip().splitlines()[-1:]}))


def _train_on_failing_disk(place: Path, run: Path, failing: int) -> None:
    """The disk fails (EIO) at the `failing`-th fsync."""
    arguments = ["train", place / "data", run, *SETTINGS]
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
        _check_checkpoints(run)
        code, _, again = call(main, arguments)
        assert code == 0, again
    assert weights(run) == weights(place / "run")
    print(json.dumps({"kind": "failing", "failed": failed, "last_line": [last]}))


def _check_line(code: int, printed: str, disk: SmallDisk) -> None:
    lines = [line for line in printed.splitlines() if "cannot write" in line]
    assert code == 2 and len(lines) == 1 and lines[0] == printed.splitlines()[-1], f"exit code {code}\n{printed}"
    assert disk.reason in lines[0] and "Traceback" not in printed, printed


def _check_checkpoints(run: Path) -> None:
    """Check that every folder called a checkpoint is whole, and that no part of one is left."""
    for folder in (run / "checkpoints").glob("step_*"):
        assert checkpoint._open(folder).step in (2, 4, 6)
    assert not list(run.glob("checkpoints/.*")), list(run.glob("checkpoints/.*"))


def _prepare(place: Path, disk_dir: Path, pages: int | None, inodes: int | None, text: bool) -> None:
    disk = SmallDisk(disk_dir, pages=pages, inodes=inodes)
    data = disk_dir / "data"
    arguments: list[str | Path] = [
        "prepare",
        *(["folder", place / "text", data] if text else [place / "audio", data, *SPLIT]),
    ]
    code, _, printed = call(text_main if text else main, arguments)
    failed = code != 0
    if failed:
        _check_line(code, printed, disk)
        disk.grow()
        code, _, again = call(text_main if text else main, arguments)
        assert code == 0, again
    assert digests(data) == digests(place / ("text_data" if text else "data"))
    assert {path.name for path in disk_dir.iterdir()} == {"data"}, "something was left behind"
    print(json.dumps({"kind": disk.kind, "failed": failed, "last_line": printed.strip().splitlines()[-1:]}))


def _sample(place: Path, disk_dir: Path, pages: int | None, inodes: int | None) -> None:
    disk = SmallDisk(disk_dir, pages=pages, inodes=inodes)
    arguments: list[str | Path] = ["sample", place / "run", "--out", disk_dir / "out", "--seconds", "0.3", "--num", "2"]
    code, _, printed = call(main, [*arguments, "--device", "cpu"])
    failed = code != 0
    if failed:
        _check_line(code, printed, disk)
    for path in (disk_dir / "out").glob("*.wav"):
        with wave.open(str(path)) as file:
            assert len(file.readframes(file.getnframes())) == 2 * file.getnframes(), path
    print(json.dumps({"kind": disk.kind, "failed": failed, "last_line": printed.strip().splitlines()[-1:]}))


def _report(place: Path, disk_dir: Path, pages: int | None, inodes: int | None, verb: str) -> None:
    disk = SmallDisk(disk_dir, pages=pages, inodes=inodes)
    entry, arguments = main, [verb, place / "run"]
    if verb == "sweep":
        entry, arguments = text_main, [verb, place / "text_run", "--compressed", "8,16"]
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
    code, _, printed = call(entry, [*arguments, "--json", json_file])
    failed = code != 0
    if failed:
        _check_line(code, printed, disk)
        disk.grow()
        code, _, again = call(entry, [*arguments, "--json", json_file])
        assert code == 0, again
    json.loads(json_file.read_text())
    assert not list(disk_dir.rglob("*.partial"))
    print(json.dumps({"kind": disk.kind, "failed": failed, "last_line": printed.strip().splitlines()[-1:]}))


def _spread(highest: int, count: int, source: random.Random) -> list[int]:
    """Draw `count` whole numbers from 1 to `highest`, one from each of as many equal parts."""
    edges = [1 + i * highest // count for i in range(count + 1)]
    return [source.randrange(a, max(b, a + 1)) for a, b in itertools.pairwise(edges)]


@fault(
    "disk full",
    "one line names the file, exit code 2; every checkpoint is whole and no part of one is left; with more space the "
    "same command ends bit for bit as usual; WAVs written so far can be opened; the same if the disk fails, with exit "
    "code 1",
    short=10,
    long=150,
)
def _full_disk(folder: Path, cases: int, source: random.Random) -> dict[str, Any]:
    place = folder / "place"
    place.mkdir()
    forkserver.run(_make, place, output=folder / "made.txt")
    plan: list[tuple[Any, ...]] = []
    share = {"run": 0.4, "data": 0.2, "text_run": 0.1, "text_data": 0.1}
    for name, part in share.items():
        pages, inodes = _size(place / name)
        function, text = (_train if "run" in name else _prepare), "text" in name
        count = max(3, round(cases * part))
        plan += [(function, place, n, None, text) for n in _spread(pages, count - count // 3, source)]
        plan += [(function, place, None, n, text) for n in _spread(inodes, count // 3, source)]
    plan += [(_sample, place, n, None) for n in _spread(9, max(2, cases // 10), source)]
    plan += [(_sample, place, None, 2)]
    plan += [(_train_on_failing_disk, place, n) for n in _spread(25, max(2, cases // 10), source)]
    verbs = ("evaluate", "compare", "analyse", "sweep", "bench")[: 5 if cases >= 100 else 4]
    plan += [(_report, place, n, None, verb) for verb in verbs for n in ((1, 2, 4) if cases >= 100 else (1,))]
    plan += [(_report, place, None, n, verb) for verb in verbs for n in ((1, 2, 3, 4) if cases >= 100 else ())]
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
