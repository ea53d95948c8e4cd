"""Training of an agent killed at any time: the same command must end with the weights of an undisturbed run."""

import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.faults import forks
from tests.faults.fault import fault
from tests.faults.killed_training import same

_TRAIN = [
    *("preset=smoke", "train.max_steps=60", "train.checkpoint_every=7", "train.log_every=5", "train.device=cpu"),
    "train.keep_checkpoints=1",
]


def _start(run_dir: Path) -> forks.Process:
    return forks.start(["-m", "recipes", "train", "object_matching", str(run_dir), *_TRAIN])


def _last(run_dir: Path) -> dict[str, Any]:
    folder = run_dir / "checkpoints" / "step_00000060"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimiser", "rank_0")}


@fault(
    "agents killed while training, at any time",
    "resumes; weights, optimiser, states and random numbers are those of an undisturbed run",
    short=1,
    long=40,
)
def _kill_agents(folder: Path, cases: int, rng: random.Random) -> dict[str, Any]:
    """Kill real commands at random times, again and again until they end by themselves."""
    began = time.monotonic()
    process = _start(folder / "undisturbed")
    printed = process.communicate(timeout=forks.TIMEOUT_S)[0]
    assert process.returncode == 0, printed
    took_s, expected = time.monotonic() - began, _last(folder / "undisturbed")
    kills = runs = 0
    while kills < cases:
        run_dir, ended = folder / f"run_{runs}", False
        runs += 1
        while not ended:
            process = _start(run_dir)
            if kills < cases:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(rng.uniform(0.3, 1) * took_s)
                if process.poll() is None:
                    kills += 1
                    process.kill()
            printed = process.communicate(timeout=forks.TIMEOUT_S)[0]
            ended = process.returncode == 0
            assert ended or process.returncode < 0, printed
        assert same(_last(run_dir), expected), f"run {runs} is not the undisturbed one"
    return {"kills": kills, "runs": runs}
