"""Training of an agent killed at any time: the same command must end with the weights of an undisturbed run."""

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from recipes.cli import main
from tests.faults import forks, forkserver
from tests.faults.fault import fault
from tests.faults.killed_training import same

_STEPS = 20
_TRAIN = [
    *("preset=smoke", f"train.max_steps={_STEPS}", "train.checkpoint_every=3", "train.log_every=5"),
    *("train.device=cpu", "train.keep_checkpoints=1"),
]
_ROWS = 8  # of preset=smoke


_IN_PROCESSES = ["rl", "env=CartPole-v1", "env_processes=true"]


def _command(run_dir: Path, recipe: Sequence[str]) -> list[str]:
    name, *settings = recipe
    return ["train", name, str(run_dir), *_TRAIN, *settings]


def _train(run_dir: Path, recipe: Sequence[str]) -> None:
    assert main(_command(run_dir, recipe)) == 0


def _to_the_end(run_dir: Path, recipe: Sequence[str]) -> dict[str, Any]:
    """Train, or continue, without a disturbance; return what the last checkpoint has."""
    forkserver.run(_train, run_dir, recipe, output=run_dir.with_suffix(".log"), daemon=False)
    folder = run_dir / "checkpoints" / f"step_{_STEPS:08d}"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimiser", "rank_0")}


@fault(
    "agents killed while training, at any time",
    "resumes; weights, optimiser, states and random numbers are those of an undisturbed run",
    short=1,
    long=40,
)
def _kill_agents(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Kill training some time after a checkpoint, again and again until it ends by itself."""
    recipe = ["object_matching"]
    expected = _to_the_end(folder / "undisturbed", recipe)
    kills = runs = 0
    while kills < cases:
        run_dir, ended = folder / f"run_{runs}", False
        runs += 1
        while not ended and kills < cases:
            name = f"step_{3 * rng.randrange(1, _STEPS // 3):08d}"
            process = forkserver.start(_train, run_dir, recipe, output=folder / "killed.log")
            while process.is_alive() and not any(path.name >= name for path in run_dir.glob("checkpoints/step_*")):
                time.sleep(0.002)
            process.join(rng.uniform(0, 0.1))
            process.kill()
            process.join()
            ended = process.exitcode == 0
            kills += not ended
        assert same(_to_the_end(run_dir, recipe), expected), f"run {runs} is not the undisturbed one"
    return {"kills": kills, "runs": runs}


def _environments(process: forks.Process) -> list[int]:
    """The processes of a command's environments, which its fork server started."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    return sorted(child for child, parent in parents.items() if parents.get(parent) == process.pid)


@fault(
    "an agent's environment or its training killed, each row in a process of its own",
    "one line, no process is left, and the same command ends as an undisturbed run does",
    short=2,
    long=40,
)
def _kill_environments(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    pytest.importorskip("gymnasium")
    expected = _to_the_end(folder / "undisturbed", _IN_PROCESSES)
    for case in range(cases):
        run_dir = folder / f"run_{case}"
        process = forks.start(["-m", "recipes", *_command(run_dir, _IN_PROCESSES)])
        while len(environments := _environments(process)) < _ROWS or not list(run_dir.glob("checkpoints/step_*")):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        if case % 2:
            process.kill()
            process.communicate(timeout=forks.TIMEOUT_S)
        else:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(rng.choice(environments), signal.SIGKILL)
            printed = process.communicate(timeout=forks.TIMEOUT_S)[0]
            told = "the process of the environment in row" in printed and "Traceback" not in printed
            assert process.returncode == 0 or (process.returncode == 1 and told), printed
        until = time.monotonic() + forks.TIMEOUT_S
        while left := [pid for pid in environments if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < until, f"case {case}: processes {left} are left"
            time.sleep(0.05)
        assert same(_to_the_end(run_dir, _IN_PROCESSES), expected), f"run {case} is not the undisturbed one"
    return {"kills": cases}
