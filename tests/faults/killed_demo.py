"""`waveform demo` killed, or asked to stop, at any moment.

The same command then continues to the end, with the figures and samples of an undisturbed demo, and nothing
else is left.
"""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.content import content
from tests.faults import forks, killed_training, preempted
from tests.faults.fault import fault
from tests.faults.forks import Points

_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_SETTINGS = [
    *("train.max_seconds=null", "train.max_steps=3", "train.batch_size=2", "train.checkpoint_every=2"),
    *("train.evaluate_every=2", "train.evaluate_tokens=200", "train.device=cpu"),
]
_OF_THE_CLOCK = {
    *("train_seconds", "train_tokens_per_second", "train_tokens_per_second_by_slice"),
    *("sampling_tokens_per_second", "learning_curve", "train_waited_share"),
}


def _shorten(folder: Path) -> None:
    """Make this process's demos quick: tones instead of speech, shorter samples."""
    from tests.test_cli import write_tones
    from waveform.verbs import demo

    for split in ("train", "valid", "test"):
        write_tones(folder / "speech" / split, num=2, seconds=0.05)
    demo.demo_speech_dir = lambda: folder / "speech"
    demo._SAMPLE_SECONDS = demo._REPORT_SECONDS = 0.01


def _surround_stages(points: Points) -> None:
    """Make a point before and after each stage of a demo."""
    from waveform.verbs import demo

    for name in ("prepare", "train_all", "report", "write_json", "write_wav", "sample", "save_demo_panel"):
        killed_training.surround(demo, name, points)


def _content(out: Path) -> dict[str, Any]:
    """Return all that a finished demo leaves, except for times and the bytes of pictures and logs."""
    entries = json.loads((out / "comparison.json").read_bytes())
    picture = (out / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and picture.endswith(b"IEND\xaeB`\x82"), "the picture is not whole"
    return {
        "files": sorted(forks.names_under(out, skip=lambda path: "tensorboard" in path.parts)),
        "comparison": [{key: value for key, value in e.items() if key not in _OF_THE_CLOCK} for e in entries],
        **content(out / "samples"),
        **content(out / "data" / "shards"),
    }


@fault(
    "the demo killed, or asked to stop",
    "the same command continues to the end, with the comparison and samples of an undisturbed one; nothing left over",
    short=0,  # because a case takes some seconds
    long=60,
    in_server=True,
)
def _disturb(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Send a signal at points spread over the demo, each time in a new folder of the same name; then run it again."""
    from waveform.cli import main

    _shorten(folder)
    out, log = folder / "out", folder / "command.log"
    arguments = ["demo", "--out", str(out), *_SETTINGS]
    assert main(arguments) == 0  # here, so that forks find imports and kernels
    shutil.rmtree(out)
    demo = preempted.command(arguments, also=_surround_stages)
    points = forks.undisturbed(demo, log)
    expected = _content(out)
    chosen = forks.spread(points, cases, rng)
    counts: dict[str, int] = {}
    for index in chosen:
        shutil.rmtree(out)
        number = rng.choice(_SIGNALS)
        print(f"{number.name} at {index}, {points[index]!r}")
        code = forks.wait(forks.disturbed(demo, log, Points({index: number})))
        if number == signal.SIGKILL:
            assert code == -number, (code, log.read_text())
        else:
            preempted.check_last_line(log, code, number, verb="demo")
        counts[number.name] = counts.get(number.name, 0) + 1
        forks.undisturbed(demo, log)
        found = _content(out)
        for what in expected.keys() | found.keys():
            assert found.get(what) == expected.get(what), f"different {what}: {found.get(what)!r:.3000}"
        log.unlink(missing_ok=True)
    return {"signals": counts, "points": len(points)}
