"""Commands killed, or asked to stop, at any point: what they leave can be used, and the same command then works."""

import io
import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import soundfile

from tests.calling import write_splits
from tests.content import content
from tests.faults import forks, killed_training, preempted
from tests.faults.fault import fault
from tests.faults.forks import Points
from tests.faults.killed_preparation import make_sources
from waveform.audio import wav
from waveform.cli import main
from waveform.verbs import demo
from waveform.verbs.sample import sample


class _Command(NamedTuple):
    """A command, whose arguments name the folder `out` for what it makes."""

    arguments: Sequence[str | Path]
    cases: int
    also: Callable[[Points], None] = lambda points: None  # makes more points
    made: Callable[[Path], Any] = content  # what of `out` must be the same if the command was stopped and run again


def _stop(
    folder: Path, commands: dict[str, _Command], signals: Sequence[signal.Signals], rng: random.Random
) -> dict[str, Any]:
    """Send a signal at points spread over each command, each time in a new folder `out`; then run it again."""
    out, log, figures = folder / "out", folder / "command.log", {}
    for verb, command in commands.items():
        if not command.cases:
            continue
        work = killed_training.command(command.arguments, also=command.also)
        shutil.rmtree(out, ignore_errors=True)
        points = forks.undisturbed(work, log)
        files, expected = content(out), command.made(out)
        sent: Counter[str] = Counter()
        num_wavs = 0
        for index in forks.spread(points, command.cases, rng):
            shutil.rmtree(out)
            if verb == "evaluate":  # the earlier figures must stay whole
                out.mkdir()
                (out / "figures.json").write_bytes(files["figures.json"] or b"")
            number = rng.choice(signals)
            sent[number.name] += 1
            print(f"{verb}: {number.name} at {index}, {points[index]!r}")
            code = forks.wait(forks.disturbed(work, log, Points({index: number})))
            text = log.read_text()
            if number == signal.SIGKILL:
                assert code == -number, (code, text)
            else:
                # If training has made its last step, it saves and ends as usual.
                if not (verb == "train" and code == 0 and "finished: step" in text):
                    preempted.check_last_line(text, code, number, verb=verb)
                    assert ("the same command" in text) == (verb in ("prepare", "train", "demo")), text
                assert not list(folder.glob(".*.partial")), list(folder.glob(".*.partial"))
            num_wavs += _check_left(out, files)
            # Text that is there must be whole, without a second run.
            if verb != "recipes prepare" or not out.exists():
                forks.undisturbed(work, log)
            log.unlink(missing_ok=True)
            found = command.made(out)
            assert found.keys() == expected.keys(), sorted(found)
            different = [what for what in found if found[what] != expected[what]]
            assert not different, f"different {different}: {[found[what] for what in different]!r:.3000}"
        figures[verb] = {"signals": dict(sent), "points": len(points), "wavs_opened": num_wavs}
    return figures


def _check_left(out: Path, expected: dict[str, bytes | None]) -> int:
    """Check that the WAVs and JSON of a stopped command can be read and hold the beginning or all; count the WAVs."""
    for path in out.glob("[!.]*.json"):
        json.loads(path.read_bytes())
    wavs = list(out.glob("[!.]*.wav"))
    for path in wavs:
        final = path.name.replace(".unfinished", "")
        samples, rate_hz = soundfile.read(path, dtype="int16")
        reference, _ = soundfile.read(io.BytesIO(expected[final] or b""), dtype="int16")
        assert rate_hz == 24_000 and (samples == reference[: len(samples)]).all(), path.name
        assert len(samples) == len(reference) or path.name != final, f"{path.name} is not whole"
        declared = int.from_bytes(path.read_bytes()[40:44], "little")
        assert declared == 2 * len(samples) <= path.stat().st_size - 44, f"{path.name} declares another length"
    return len(wavs)


def _trained(folder: Path) -> Path:
    """Return a run that has been sampled from, so that forks find the kernels."""
    run_dir = killed_training.Place(folder).whole
    sample(run_dir, folder / "compiled", seconds=0.01, show_progress=False)
    return run_dir


@fault("other commands asked to stop", short=6, long=150, in_server=True)
def _ask(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: one line, exit code 128 + the signal's number; what is left is in nobody's way."""
    run_dir, out, each = _trained(folder), folder / "out", max(cases // 5, 1)
    make_sources(folder)
    train = ["train", folder / "audio", out / "run", *killed_training.SETTINGS, "train.evaluate_tokens=0"]
    commands = {
        "prepare": _Command(["prepare", folder / "audio", out], each),
        "recipes prepare": _Command(["recipes", "prepare", "folder", folder / "text", out], each),
        "sample": _Command(["sample", run_dir, "--out", out, "--seconds", "0.2"], each),
        "evaluate": _Command(["evaluate", run_dir, "--json", out / "figures.json"], each),
        "train": _Command(train, each, made=lambda out: {}),  # another fault compares what it made
    }
    return _stop(folder, commands, preempted.SIGNALS, rng)


def _surround_wavs(points: Points) -> None:
    """Make points before, within and after every write of a WAV."""
    real = wav.write_all

    def write(file: io.FileIO, data: bytes) -> None:
        part = "block" if file.tell() else "header"
        cut = data[: len(data) // 2 if file.tell() else 0]
        points.point(f"half of a WAV's {part}", lambda: real(file, cut))
        real(file, data)
        points.point(f"after a WAV's {part}")

    wav.write_all = write  # on purpose: this is the fault


@fault("killed while sampling, evaluating, comparing", short=4, long=100, in_server=True)
def _kill(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: WAVs can be opened and hold what was finished; JSON is whole or absent; the same command then
    works.
    """
    run, out = _trained(folder), folder / "out"
    commands = {
        "sample": _Command(["sample", run, "--out", out, "--seconds", "0.2"], cases, also=_surround_wavs),
        "evaluate": _Command(["evaluate", run, "--json", out / "figures.json"], max(cases // 4, 1)),
        # It measures speeds, so only the names of its files are compared.
        "compare": _Command(
            ["compare", run, run, "--json", out / "figures.json"],
            cases // 20,
            made=lambda out: dict.fromkeys(content(out)),
        ),
    }
    figures = _stop(folder, commands, [signal.SIGKILL], rng)
    num_wavs, kills = figures["sample"]["wavs_opened"], figures["sample"]["signals"]["SIGKILL"]
    assert num_wavs > kills // 3, num_wavs
    return figures


_DEMO_SETTINGS = [
    *("train.max_seconds=null", "train.max_steps=3", "train.batch_size=2", "train.checkpoint_every=2"),
    *("train.evaluate_every=2", "train.evaluate_tokens=200", "train.device=cpu"),
]
_OF_THE_CLOCK = {
    *("train_seconds", "train_tokens_per_second", "train_tokens_per_second_by_slice"),
    *("sampling_tokens_per_second", "learning_curve", "train_waited_share"),
}


def _surround_stages(points: Points) -> None:
    """Make a point before and after each stage of a demo."""
    for name in ("prepare", "train_all", "report", "write_json", "write_wav", "sample", "save_demo_panel"):
        killed_training.surround(demo, name, points)


def _made_by_demo(out: Path) -> dict[str, Any]:
    """Return all that a finished demo leaves, except for times and the bytes of pictures and logs."""
    entries = json.loads((out / "comparison.json").read_bytes())
    picture = (out / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and picture.endswith(b"IEND\xaeB`\x82"), "the picture is not whole"
    return {
        "files": [name for name in content(out) if "tensorboard" not in name],
        "comparison": [{key: value for key, value in e.items() if key not in _OF_THE_CLOCK} for e in entries],
        **content(out / "samples"),
        **content(out / "data" / "shards"),
    }


# A case takes some seconds.
@fault("the demo killed, or asked to stop", short=0, long=60, in_server=True)
def _stop_demo(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: the same command continues to the end, with the comparison and samples of an undisturbed one; nothing
    left over.
    """
    # This process's demos are quick: tones instead of speech, shorter samples.
    write_splits(folder / "speech", train=2, valid=2, test=2, seconds=0.05)
    demo.demo_speech_dir = lambda: folder / "speech"
    demo._SAMPLE_SECONDS = demo._REPORT_SECONDS = 0.01
    arguments = ["demo", "--out", str(folder / "out"), *_DEMO_SETTINGS]
    assert main(arguments) == 0  # here, so that forks find imports and kernels
    commands = {"demo": _Command(arguments, cases, also=_surround_stages, made=_made_by_demo)}
    return _stop(folder, commands, [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT], rng)
