"""Two processes working on one folder: a lock refuses the second, but no longer once the first is dead."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.content import content
from tests.faults import forks, killed_training
from tests.faults.fault import fault
from tests.faults.killed_preparation import make_sources
from waveform.system.atomic import is_held

Work = Callable[[], int]


def _refused(work: Work, folder: Path, says: str, *, ready: Callable[[], bool]) -> None:
    """Start `work` and stop it halfway: another process must be refused, but not once the first is dead."""
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


def _command(arguments: list[str], *, slow: tuple[Any, str]) -> Work:
    """Return a command whose function `slow` (module, name) takes a while, so that two run at the same time."""
    work = killed_training.command(arguments, also=lambda points: forks.before(*slow, lambda *_: time.sleep(0.05)))
    return lambda: work(forks.Points())


@fault("two processes on one folder", short=1, long=10, in_server=True)
def _two(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: the second is refused in one line and changes nothing; once the first is dead, it runs.

    Start each pair of commands that could harm one another, `cases` times.
    """
    from recipes.verbs import prepare
    from waveform.audio.corpus import workers
    from waveform.engine import sampler, token_learner

    place = killed_training.Place(folder)
    make_sources(folder)
    for case in range(cases):
        run_dir, data_dir, text_dir, samples = (folder / f"{name}_{case}" for name in ("run", "data", "text", "out"))
        train = ["train", str(place.data), str(run_dir), *killed_training.SETTINGS]
        _refused(
            _command(train, slow=(token_learner, "evaluate")),
            run_dir,
            f"another process is training in {run_dir}; wait for it, or give another RUN_DIR",
            ready=(run_dir / "metrics.jsonl").exists,
        )
        _refused(
            _command(["prepare", str(folder / "audio"), str(data_dir)], slow=(workers, "prepare_group")),
            data_dir,
            f"another waveform prepare is running on {data_dir}; wait until it is done",
            ready=(data_dir / "unfinished").exists,
        )
        _refused(
            _command(
                ["recipes", "prepare", "folder", str(folder / "text"), str(text_dir)], slow=(prepare, "save_tokenizer")
            ),
            text_dir,
            f"another process is preparing {text_dir}; wait until it is done",
            ready=(text_dir.with_name(f".{text_dir.name}.partial") / "train.shard").exists,
        )
        _refused(
            _command(["sample", str(run_dir), "--out", str(samples), "--seconds", "0.01"], slow=(sampler, "decoder")),
            samples,
            "another process is writing",
            ready=lambda samples=samples: any(map(is_held, samples.glob("*.unfinished.wav"))),
        )
        assert len(list(samples.iterdir())) == 1 and not list(samples.glob("*.unfinished.wav"))
        left = [path for path in folder.iterdir() if path.name.endswith(".partial")]
        assert not left, left
    return {"pairs": 4 * cases}
