"""Training of an agent killed at any time: the same command must end with the weights of an undisturbed run."""

import random
import sys
import time
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


def _train(run_dir: Path, recipe: str, *settings: str) -> None:
    sys.exit(main(["train", recipe, str(run_dir), *_TRAIN, *settings]))


def _to_the_end(run_dir: Path, *recipe: str) -> dict[str, Any]:
    """Train, or continue, without a disturbance; return what the last checkpoint has."""
    forkserver.run(_train, run_dir, *recipe, output=run_dir.with_suffix(".log"), daemon=False)
    folder = run_dir / "checkpoints" / f"step_{_STEPS:08d}"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimiser", "rank_0")}


@fault("agents killed while training, at any time", short=1, long=40)
def _kill_agents(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: resumes; weights, optimiser, states and random numbers are those of an undisturbed run."""
    expected = _to_the_end(folder / "undisturbed", "object_matching")
    kills = runs = 0
    while kills < cases:
        run_dir, ended = folder / f"run_{runs}", False
        runs += 1
        while not ended and kills < cases:
            name = f"step_{3 * rng.randrange(1, _STEPS // 3):08d}"
            process = forkserver.start(_train, run_dir, "object_matching", output=folder / "killed.log")
            while process.is_alive() and not any(path.name >= name for path in run_dir.glob("checkpoints/step_*")):
                time.sleep(0.002)
            process.join(rng.uniform(0, 0.1))
            process.kill()
            process.join()
            ended = process.exitcode == 0
            kills += not ended
        assert same(_to_the_end(run_dir, "object_matching"), expected), f"run {runs} is not the undisturbed one"
    return {"kills": kills, "runs": runs}


@fault("an agent's environment or its training killed, each row in a process of its own", short=2, long=40)
def _kill_environments(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Must hold: one line, no process is left, and the same command ends as an undisturbed run does."""
    pytest.importorskip("gymnasium")
    expected, log = _to_the_end(folder / "undisturbed", *_IN_PROCESSES), folder / "killed.log"
    for case in range(cases):
        run_dir = folder / f"run_{case}"
        process = forkserver.start(_train, run_dir, *_IN_PROCESSES, output=log, daemon=False)
        while not list(run_dir.glob("checkpoints/step_*")):
            assert process.is_alive(), log.read_text()
            time.sleep(0.02)
        servers = forks.children(process.pid, of="forkserver")
        environments = [child for server in servers for child in forks.children(server)]
        assert len(environments) == _ROWS, log.read_text()
        time.sleep(rng.uniform(0, 0.3))
        if case % 2:
            process.kill()
            process.join()
        else:
            forks.kill_if_there(rng.choice(environments))
            process.join(forks.TIMEOUT_S)
            printed = log.read_text()
            told = "the process of the environment in row" in printed and "Traceback" not in printed
            assert process.exitcode == 0 or (process.exitcode == 1 and told), printed
        processes = [Path(f"/proc/{pid}") for pid in environments]
        forks.wait_for(lambda left=processes: not any(pid.exists() for pid in left), f"case {case}: processes are left")
        assert same(_to_the_end(run_dir, *_IN_PROCESSES), expected), f"run {case} is not the undisturbed one"
    return {"kills": cases}
