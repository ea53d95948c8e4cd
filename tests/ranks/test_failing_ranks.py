"""A rank that dies or hangs ends the job with one line of reason; torchrun's restart continues from what is saved."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks.run_ranks import run_ranks
from waveform.ranks.distributed import World

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "tests/ranks/failing_ranks.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
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
