"""Sampling, evaluation and comparison killed at any moment: what they left can be used, and the next run works."""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import soundfile

from tests.content import content
from tests.faults import forks, killed_training, preempted
from tests.faults.fault import fault
from tests.faults.forks import Points


def _surround_wavs(points: Points) -> None:
    """Make points before, within and after every write of a WAV."""
    from waveform.audio.wav import WavWriter

    real = WavWriter._write

    def write(self: WavWriter, data: bytes, *, offset: int) -> None:
        part = "header" if offset == 0 else "block"
        cut = data[: len(data) // 2 if offset else 0]
        points.point(f"half of a WAV's {part}", lambda: real(self, cut, offset=offset))
        real(self, data, offset=offset)
        points.point(f"after a WAV's {part}")

    WavWriter._write = write  # on purpose: this is the fault


@fault(
    "killed while sampling, evaluating, comparing",
    "WAVs can be opened and hold what was finished; JSON is whole or absent; the same command then works",
    short=4,
    long=100,
    in_server=True,
)
def _kill(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Kill each of three commands at points spread over them."""
    from waveform.verbs.sample import sample

    run_dir, log, out = killed_training.Place(folder).whole, folder / "command.log", folder / "out"
    sample(run_dir, folder / "compiled", seconds=0.01, show_progress=False)  # so that forks find the kernels
    commands = {
        "sample": ["sample", str(run_dir), "--out", str(out), "--seconds", "0.2"],
        "evaluate": ["evaluate", str(run_dir), "--json", str(out / "figures.json")],
        "compare": ["compare", str(run_dir), str(run_dir), "--json", str(out / "figures.json")],
    }
    figures: dict[str, Any] = {}
    for verb, arguments in commands.items():
        work = preempted.command(arguments, also=_surround_wavs)
        share = cases if verb == "sample" else max(cases // 4, 1) if verb == "evaluate" else cases // 20
        if not share:
            continue
        shutil.rmtree(out, ignore_errors=True)
        points = forks.undisturbed(work, log)
        expected = content(out)
        chosen = forks.spread(points, share, rng)
        num_wavs = 0
        for index in chosen:
            shutil.rmtree(out, ignore_errors=True)
            if verb == "evaluate":  # the earlier figures must stay whole
                out.mkdir()
                (out / "figures.json").write_bytes(expected["figures.json"])
            print(f"{verb} killed at {index}, {points[index]!r}")
            assert forks.wait(forks.disturbed(work, log, Points({index: signal.SIGKILL}))) == -signal.SIGKILL, (
                log.read_text()
            )
            num_wavs += _check_left(out, expected)
            forks.undisturbed(work, log)
            found = content(out)
            assert found.keys() == expected.keys(), sorted(found)
            if verb != "compare":  # which measures speeds
                assert found == expected, "different content"
        figures[verb] = {"kills": len(chosen), "points": len(points)}
        if verb == "sample":
            figures[verb]["wavs_opened"] = num_wavs
            assert num_wavs > len(chosen) // 3, num_wavs
    return figures


def _check_left(out: Path, expected: dict[str, Any]) -> int:
    """Check that the WAVs and JSON of a killed command can be read and hold the beginning or all; count the WAVs."""
    num_wavs = 0
    for path in out.glob("[!.]*"):
        if path.suffix == ".json":
            json.loads(path.read_bytes())
            continue
        final = path.name.replace(".unfinished", "")
        samples, rate_hz = soundfile.read(path, dtype="int16")
        whole = path.with_name("whole.wav")
        whole.write_bytes(expected[final])
        reference, _ = soundfile.read(whole, dtype="int16")
        whole.unlink()
        assert rate_hz == 24_000 and (samples == reference[: len(samples)]).all(), path.name
        assert len(samples) == len(reference) or path.name != final, f"{path.name} is not whole"
        declared = int.from_bytes(path.read_bytes()[40:44], "little")
        assert declared == 2 * len(samples) <= path.stat().st_size - 44, (
            f"{path.name}: the length in its header is wrong"
        )
        num_wavs += 1
    return num_wavs
