"""A rank that dies or hangs ends the job with one line of reason; torchrun's restart continues from what is saved."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import forks, forkserver
from waveform.ranks.distributed import job
from waveform.system.errors import Trouble

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


def _work_alone(rank: int, port: int, missing: int | None) -> None:
    """One of three ranks: the first has work for longer than the others would wait for one that hangs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with job(device="cpu", timeout_s=_TIMEOUT_S) as world:
            for work_s in (0, 2 * _TIMEOUT_S):
                if rank == missing and work_s:
                    time.sleep(60)
                began = time.monotonic()
                with world.first_alone():
                    if world.is_first:
                        time.sleep(work_s)
                assert time.monotonic() - began > work_s - 0.5
        print("done", flush=True)
    except Trouble as error:
        print(error, flush=True)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [None, 2])
def test_others_wait_while_the_first_rank_works(missing: int | None, tmp_path: Path) -> None:
    """It may take longer than `timeout_s`; a rank that does not come is named, and only that."""
    port, files = forks.free_port(), [tmp_path / str(rank) for rank in range(3)]
    ranks = [forkserver.start(_work_alone, rank, port, missing, output=file) for rank, file in enumerate(files)]
    for rank, process in enumerate(ranks):
        process.join(60 if rank != missing else 0)
        process.kill()
    said = [file.read_text().strip().splitlines()[-1] for file in files if file.read_text()]
    if missing is None:
        assert said == ["done"] * 3
    else:
        hangs = f"rank 2 did not answer for {_TIMEOUT_S:g} s (in training: train.timeout_s) and may hang"
        assert said[0] == f"rank 0 stops: {hangs}"
        assert said[1].startswith("rank 1 stops: another rank ")  # it may give up at the same moment
