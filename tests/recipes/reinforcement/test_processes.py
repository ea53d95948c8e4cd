"""Environments in processes of their own: the same as in one process, and what is said when one of them ends."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from recipes.reinforcement.environment_processes import EnvironmentProcesses
from recipes.reinforcement.object_matching import ObjectMatching, ObjectMatchingConfig
from tests.recipes.calling import figures_of, mistake, run
from waveform.engine.metrics import read_metrics
from waveform.system.errors import Trouble

pytestmark = pytest.mark.slow
_ROWS = np.arange(4, 7)
_MAKE = partial(ObjectMatching, ObjectMatchingConfig(episode=9), seed=2)


def _actions(num_steps: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 4, (num_steps, len(_ROWS)))


def test_rows_in_processes_are_those_of_one_process() -> None:
    here, there = _MAKE(rows=_ROWS), EnvironmentProcesses(_MAKE, rows=_ROWS)
    assert (there.observation, there.num_actions) == (here.observation, here.num_actions)
    assert np.array_equal(here.begin(), there.begin())
    restored = EnvironmentProcesses(_MAKE, rows=_ROWS)
    for number, actions in enumerate(_actions(40)):
        if number == 30:
            restored.restore(there.state())
        wanted = here.step(actions)
        for environments in (there, restored) if number >= 30 else (there,):
            for x, y in zip(wanted, environments.step(actions), strict=True):
                assert np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype
    assert all(np.array_equal(x, y) for x, y in zip(here.state(), there.state(), strict=True))
    assert np.array_equal(here.picture(), there.picture())


def test_processes_end_with_the_environments() -> None:
    environments = EnvironmentProcesses(_MAKE, rows=_ROWS)
    environments.begin()
    processes = list(environments._processes)
    assert all(process.is_alive() for process in processes)
    del environments
    for process in processes:
        process.join(20)
        assert process.exitcode == 0


def test_a_program_ends_although_it_holds_environments() -> None:
    """Python waits for processes that were started, and these end only when nobody can ask them any more."""
    program = """
from functools import partial
import numpy as np
from recipes.reinforcement.environment_processes import EnvironmentProcesses
from recipes.reinforcement.object_matching import ObjectMatching, ObjectMatchingConfig
if __name__ == "__main__":
    environments = EnvironmentProcesses(partial(ObjectMatching, ObjectMatchingConfig(), seed=2), rows=np.arange(3))
    print(environments.begin().shape[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3\n" and done.stderr == ""


def test_a_process_that_was_killed_is_named() -> None:
    environments = EnvironmentProcesses(_MAKE, rows=_ROWS)
    environments.begin()
    process = environments._processes[1]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)  # as a terminal does for all processes; the one that trains decides
    environments.step(_actions(1)[0])
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(Trouble, match=r"environment in row 1 has ended \(exit code -9\).*from the last checkpoint"):
        for actions in _actions(2):
            environments.step(actions)


class TestDMLab:
    """By a simulated engine, of which a process can have only one, as of the real one."""

    @pytest.fixture(autouse=True)
    def _needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("gymnasium")
        monkeypatch.syspath_prepend(Path(__file__).parent / "simulated")

    def test_the_papers_run_in_small(self, tmp_path: Path) -> None:
        small = ["train.batch_size=2", "train.chunk=10", "train.log_every=1", "train.checkpoint_every=3"]
        small += ["model.window=5", "model.memory=5", "model.compressed=5", "model.d_model=32"]
        settings = ["env=DMLab-v0", "env_processes=true", "preset=paper", *small]
        run("train", "rl", tmp_path / "whole", *settings, "train.max_steps=6")
        run("train", "rl", tmp_path / "cut", *settings, "train.max_steps=3")
        run("train", "rl", tmp_path / "cut", *settings, "train.max_steps=6")
        logs = [read_metrics(tmp_path / name) for name in ("whole", "cut")]
        assert sum(record["episodes"] for record in logs[0]) == 2  # 3 s of 15 steps, in two rows
        times = ("seconds", "steps_per_second")
        whole, cut = ([{k: v for k, v in record.items() if k not in times} for record in log] for log in logs)
        assert whole == cut
        figures = figures_of(tmp_path / "whole.json", "evaluate", tmp_path / "whole", "--episodes", 3)
        assert figures["episodes"] == 4  # two of each of its two rows
        assert figures["human_normalised"] == pytest.approx((figures["return_mean"] - 0.312) / (65.9 - 0.312))
        run("play", tmp_path / "whole", "--gif", tmp_path / "episode.gif", "--steps", 4)
        assert (tmp_path / "episode.gif").stat().st_size > 1000

    def test_a_second_one_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pytest.importorskip("recipes.reinforcement.dmlab").DMLab, "_made", True)
        line = mistake(["train", "rl", tmp_path / "a", "env=DMLab-v0", "preset=paper"])
        assert line.endswith("a process can have only one DMLab; give env_processes=true, and each row has its own")


def test_dmlab_missing_is_one_line(tmp_path: Path) -> None:
    """As every mistake in a process of an environment is told: as in this process."""
    pytest.importorskip("gymnasium")
    train = ["train", "rl", tmp_path / "a", "env=DMLab-v0", "train.batch_size=2"]  # a process each
    for processes in ("true", "false"):
        line = mistake([*train, f"env_processes={processes}"])
        assert "needs DeepMind Lab's Python module, deepmind_lab, which has to be built" in line
    line = mistake([*train, "env_processes=4"])
    assert line.endswith("Expected `bool | null`, got `int` - at `env_processes`")
    assert not (tmp_path / "a").exists()
