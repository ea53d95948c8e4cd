"""A rank that dies or hangs ends the job with one line of reason; torchrun's restart continues from what is saved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
