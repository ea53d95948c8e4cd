"""Asked to stop by SIGTERM or SIGINT at any moment of any command; training saves once and says so."""

import json
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.faults import forks, killed_training
from tests.faults.fault import Fault
from tests.faults.forks import Failures, Points

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def command(arguments: list[str], said: Path, *, points: Points, surround: bool = True) -> int:
    """Run a command line in a child; returns its id."""

    def work() -> int:
        from waveform.cli import main
        from waveform.engine import reading, trainer
        from waveform.engine.trainer import Trainer

        points.install()
        if surround:
            for owner, name in ((Trainer, "update"), (trainer, "evaluate"), (reading, "score_window")):
                killed_training.surround(owner, name, points)
        code = main(arguments)
        points.enabled = False
        said.with_suffix(".points").write_text(json.dumps(points.seen))
        return code

    return forks.fork(work, output=said)


def count_points(arguments: list[str], said: Path) -> list[str]:
    """The points of a command that nothing disturbs."""
    code = forks.wait(command(arguments, said, points=Points()))
    assert code == 0, said.read_text()
    said.unlink()
    points_file = said.with_suffix(".points")
    points: list[str] = json.loads(points_file.read_text())
    points_file.unlink()
    return points


def check_told(said: Path, code: int, number: int, *, verb: str) -> None:
    """One line says what stopped it, and the exit code too."""
    text = said.read_text()
    assert code == 128 + number, f"exit code {code}: {text[-2000:]}"
    assert "Traceback" not in text, text[-3000:]
    name = signal.Signals(number).name
    assert len(re.findall(rf"stopped by {name}", text)) == 1, f"{verb}: {text}"


def _training(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """A signal at points spread over a training, once or twice in a row; then the same command to the end."""
    place = killed_training.Place(folder)
    said = folder / "said.log"

    def arguments(run_dir: Path) -> list[str]:
        return ["train", str(place.data.folder), "--run", str(run_dir), *killed_training.SETTINGS]

    points = count_points(arguments(folder / "counted"), said)
    failures = Failures()
    saved = ended_at_once = 0
    for index in forks.spread(points, cases, rng):
        run_dir, number = folder / f"run_{index}", rng.choice(_SIGNALS)
        twice = rng.random() < 0.25
        signals = {index: int(number), **({index + 1: int(rng.choice(_SIGNALS))} if twice else {})}
        case = f"{[signal.Signals(n).name for n in signals.values()]} at {index}, {points[index]!r}"
        with failures.of(case):
            code = forks.wait(command(arguments(run_dir), said, points=Points(signals=signals)))
            text = said.read_text() if said.exists() else ""
            if twice and code < 0:
                assert -code == list(signals.values())[1] and "Traceback" not in text, (code, text)
                ended_at_once += 1
            elif code or not re.search(r"^finished: ", text, re.MULTILINE):  # in the last line of its log, too late
                check_told(said, code, number, verb="train")
                saved += _check_saved_once(place, run_dir, text)
            place.check_checkpoints(run_dir)
            assert forks.wait(command(arguments(run_dir), said, points=Points())) == 0, said.read_text()
            found = killed_training.final(run_dir)
            for what, expected in place.expected.items():
                assert killed_training.same(found[what], expected), killed_training.difference(found[what], expected)
        shutil.rmtree(run_dir, ignore_errors=True)
        said.unlink(missing_ok=True)
    failures.tell()
    assert saved > cases // 4 and (ended_at_once or cases < 30), (saved, ended_at_once)
    return {"signals": cases, "points": len(points), "saved": saved, "second_ended_at_once": ended_at_once}


def _check_saved_once(place: killed_training.Place, run_dir: Path, text: str) -> bool:
    """Whether it was training that was stopped: then the step that it says is saved, and nothing half-written stays."""
    step = re.search(r"the same command resumes: step (\d+),", text)
    if step is None:
        return False
    checkpoints = [path.name for path in (run_dir / "checkpoints").iterdir()] if int(step[1]) else []
    assert int(step[1]) == 0 or f"step_{int(step[1]):08d}" in checkpoints, (step[0], checkpoints)
    assert len(checkpoints) <= 2 and not any(name.startswith(".") for name in checkpoints), checkpoints
    return True


def run(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Signals during training."""
    return forks.in_server(__name__, folder, cases, rng, what="training")


FAULTS = [
    Fault(
        "training asked to stop, once or twice",
        "saves once; one line and 128 + the signal; a second signal ends it at once; resumes as if undisturbed",
        run,
        short=10,
        long=300,
    ),
]

if __name__ == "__main__":
    forks.serve({"training": _training})
