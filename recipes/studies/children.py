"""How much of a study is run, and its processes, each of which trains or evaluates one run."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from recipes.studies.report import Figures
from waveform.system.cpu import num_cores
from waveform.system.errors import UserError
from waveform.system.rules import check_rules, whole_number

Run = tuple[str, int]  # a setting, by its label, and a seed
_LAST_WORDS = 3  # lines of a failed child's output that are shown
_Count = Annotated[int, whole_number(1, 1 << 16)]  # the limit is far above any use


@dataclass(frozen=True)
class StudyConfig:
    """How much of a study is run, and how fast."""

    seeds: _Count | None = None  # runs of each setting; None: the study's own number
    jobs: _Count = 2  # runs at a time
    rows: _Count | None = None  # of evaluations: pieces that text is cut into; None: whole documents
    config_dir: Path | None = None  # a folder of the user's own Hydra configs
    agents: Sequence[str] = ()  # for figure5: those that are trained; empty: all
    envs: Sequence[str] = ()  # for Gymnasium: further environments to evaluate them in

    def __post_init__(self) -> None:
        check_rules(self)


class Children:
    """Runs `python -m recipes` in processes of their own; each saves what it did if it is asked to end."""

    def __init__(self, jobs: int) -> None:
        """jobs: how many run at a time, each with its share of the CPU's threads."""
        self._jobs, self.threads = jobs, max(1, num_cores() // jobs)
        self._running: set[subprocess.Popen[str]] = set()

    def call(self, *arguments: str) -> None:
        """Run `python -m recipes` with arguments, quietly. Raises UserError with its last lines if it fails."""
        child = subprocess.Popen(
            [sys.executable, "-m", "recipes", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it only through `finish_all`, once
        )
        self._running.add(child)
        output = child.communicate()[0]
        self._running.discard(child)
        if child.returncode:
            last = " | ".join(output.strip().splitlines()[-_LAST_WORDS:])
            raise UserError(f"`recipes {' '.join(arguments)}` failed with exit code {child.returncode}: {last}")

    def finish_all(self, runs: Sequence[Run], finish: Callable[[Run], Figures]) -> dict[Run, Figures]:
        """Call `finish`, which uses `call`, on each of `runs`, some at a time; return what it returned, by run.

        If one fails, or a signal asks to stop, the others are asked to end as well, and the first error is raised.
        """
        pool = ThreadPoolExecutor(self._jobs)
        try:
            return dict(zip(runs, pool.map(finish, runs), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in tuple(self._running):
                child.terminate()
            raise
