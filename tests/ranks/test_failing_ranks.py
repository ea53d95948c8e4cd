"""A rank that dies or hangs ends the job with one line of reason; torchrun's restart continues from what is saved."""

import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.engine.conftest import write_tokens
from tests.engine.training import small_trainer
from tests.ranks.run_ranks import run_ranks
from waveform.ranks.distributed import World, job
from waveform.system.errors import UserError

_TORCHRUN_TIMEOUT_S = 8


def _fail(folder: Path) -> None:
    """What torchrun's agent runs: rank 1 kills itself once, then hangs once, then continues."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with job(device="cpu", timeout_s=_TORCHRUN_TIMEOUT_S) as world:
        tokens = write_tokens(folder / f"tokens_{attempt}_{world.rank}", [60, 45, 33, 80])
        train = {"max_steps": 8, "checkpoint_every": 2, "timeout_s": _TORCHRUN_TIMEOUT_S}
        trainer = small_trainer("compressive_transformer", tokens, folder / "run", world=world, **train)
        if world.is_first:
            (folder / f"attempt_{attempt}").write_text(str(trainer.learner.step))
        update = trainer.learner.update

        def fail() -> Any:
            if world.rank == 1 and (attempt, trainer.learner.step) == (0, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            if world.rank == 1 and (attempt, trainer.learner.step) == (1, 5):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that torchrun can end it without its 30 s of grace
                time.sleep(600)
            return update()

        trainer.learner.update = fail
        try:
            trainer.run()
        except UserError as error:
            print(f"attempt {attempt}: {error}", file=sys.stderr, flush=True)
            os._exit(2)


def _launch(folder: Path) -> None:
    """What `torchrun --standalone --nproc-per-node=2 --max-restarts=2` does, with forks of a process that has torch."""
    import_module("torch._dynamo")  # which each of them would import with its first optimiser
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=2,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    elastic_launch(config, _fail)(folder)


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    command, root = [sys.executable, "-m", __name__, str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"attempt_{i}").read_text() for i in range(3)] == ["0", "2", "4"]
    assert not (tmp_path / "attempt_3").exists()
    assert "attempt 0: rank 0 stops at step 3 (step 2 is saved" in done.stderr
    assert "another rank ended" in done.stderr
    assert "attempt 1: rank 0 stops at step 5 (step 4 is saved" in done.stderr
    assert "another rank did not answer for 8 s (in training: train.timeout_s)" in done.stderr


_TIMEOUT_S = 2.0


def _work_alone(world: World, folder: Path) -> None:
    """The first rank has work for longer than the others would wait for one that hangs; the last may not come."""
    for work_s in (0, 2 * _TIMEOUT_S):
        if work_s and world.rank == 2 and (folder / "missing").exists():
            time.sleep(3 * _TIMEOUT_S)
            os._exit(0)
        began = time.monotonic()
        with world.first_alone():
            if world.is_first:
                time.sleep(work_s)
        assert time.monotonic() - began > work_s - 0.5


@pytest.mark.slow
def test_others_wait_while_the_first_rank_works(tmp_path: Path) -> None:
    run_ranks(_work_alone, 3, tmp_path, timeout_s=_TIMEOUT_S)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    (tmp_path / "missing").touch()
    hangs = rf"rank 0 stops: rank 2 did not answer for {_TIMEOUT_S:g} s \(in training: train.timeout_s\) and may hang"
    with pytest.raises(AssertionError, match=hangs):
        run_ranks(_work_alone, 3, tmp_path, timeout_s=_TIMEOUT_S)


if __name__ == "__main__":
    _launch(Path(sys.argv[1]))
    os._exit(0)  # the test does not care how gloo's threads end
