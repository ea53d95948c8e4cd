"""Two processes working on one folder: a lock refuses the second, but no longer once the first is dead."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from recipes.verbs import prepare
from tests.content import content
from tests.faults import forks, killed_training
from tests.faults.fault import fault
from tests.faults.killed_preparation import make_sources
from waveform.audio.corpus import workers
from waveform.engine import sampler, token_learner
from waveform.system.atomic import is_held


def _refused(
    arguments: list[str | Path], folder: Path, *, slow: tuple[Any, str], says: str, ready: Callable[[], bool]
) -> None:
    """Start a command and stop it halfway: another process must be refused, but not once the first is dead.

    slow: a function (module, name) that is to take a while, so that two processes run at the same time.
    """
    command = killed_training.command(arguments, also=lambda _: forks.before(*slow, lambda *_: time.sleep(0.05)))
    work = partial(command, forks.Points())
    first = forks.fork(work)
    forks.wait_for(ready, "the first never held the folder")
    os.kill(first, signal.SIGSTOP)
    log = folder.with_name(f"{folder.name}.log")
    try:
        assert os.waitpid(first, os.WNOHANG) == (0, 0), "the first ended too early to be in the way"
        before = content(folder).keys()
        assert forks.wait(forks.fork(work, output=log)) == 2, log.read_text()
        assert says in log.read_text() and "Traceback" not in log.read_text(), log.read_text()
        assert len(log.read_text().splitlines()) == 1 or "preparing" in log.read_text(), log.read_text()
        assert content(folder).keys() == before, "the second left something behind"
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    assert forks.wait(forks.fork(work, output=log)) == 0, log.read_text()


@fault("two processes on one folder", short=1, long=10, in_server=True)
def _two(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: the second is refused in one line and changes nothing; once the first is dead, it runs."""
    place = killed_training.Place(folder)
    make_sources(folder)
    for case in range(cases):
        run_dir, data_dir, text_dir, samples = (folder / f"{name}_{case}" for name in ("run", "data", "text", "out"))
        _refused(
            ["train", place.data, run_dir, *killed_training.SETTINGS], run_dir, slow=(token_learner, "evaluate"),
            says=f"another process is training in {run_dir}; wait for it, or give another RUN_DIR",
            ready=(run_dir / "metrics.jsonl").exists,
        )  # fmt: skip
        _refused(
            ["prepare", folder / "audio", data_dir], data_dir, slow=(workers, "prepare_group"),
            says=f"another waveform prepare is running on {data_dir}; wait until it is done",
            ready=(data_dir / "unfinished").exists,
        )  # fmt: skip
        _refused(
            ["recipes", "prepare", "folder", folder / "text", text_dir], text_dir, slow=(prepare, "save_tokenizer"),
            says=f"another process is preparing {text_dir}; wait until it is done",
            ready=(text_dir.with_name(f".{text_dir.name}.partial") / "train.shard").exists,
        )  # fmt: skip
        _refused(
            ["sample", run_dir, "--out", samples, "--seconds", "0.01"], samples, slow=(sampler, "decoder"),
            says="another process is writing",
            ready=lambda samples=samples: any(map(is_held, samples.glob("*.unfinished.wav"))),
        )  # fmt: skip
        assert len(list(samples.iterdir())) == 1 and not list(samples.glob("*.unfinished.wav"))
        left = [path for path in folder.iterdir() if path.name.endswith(".partial")]
        assert not left, left
    return {"pairs": 4 * cases}
