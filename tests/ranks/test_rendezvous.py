"""Ranks find the others of their attempt, whatever an earlier one left in torchrun's store."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.faults.forks import become_rank, free_port
from waveform.ranks import rendezvous
from waveform.ranks.distributed import job
from waveform.ranks.rendezvous import meet, rendezvous_store
from waveform.system.errors import Trouble, UserError


def attempt(number: int, store: dist.Store, order: list[int]) -> list[str]:
    """What ranks that start in this order, a moment after each other, read of what the first one wrote."""
    found: list[str] = []

    def come(rank: int) -> None:
        ours = meet(store, rank, len(order), timeout=timedelta(seconds=20))
        if rank == 0:
            ours.set("attempt", str(number))
        found.append(ours.get("attempt").decode())

    threads = [threading.Thread(target=come, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join()
    return found


def test_ranks_of_an_attempt_meet_without_what_earlier_ones_left() -> None:
    store = dist.HashStore()
    for number, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1])):
        for rank in order[:number]:  # of attempts that ended before all had come
            with pytest.raises(Trouble):
                meet(store, rank, 3, timeout=timedelta(seconds=0.1))
        assert attempt(number, store, order) == [str(number)] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_reported(rank: int) -> None:
    store = dist.HashStore()
    attempt(0, store, [0, 1])
    with pytest.raises(Trouble, match=rf"rank {rank}: the other 1 ranks of the job did not come within 0:00:00\.3"):
        meet(store, rank, 2, timeout=timedelta(seconds=0.3))


@mock.patch.dict(os.environ, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
def test_torchrun_that_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end while it starts its processes; they must not wait for it for hours."""
    port = free_port()
    become_rank(1, of=2, port=port)
    monkeypatch.setattr(rendezvous, "_CONNECT", timedelta(seconds=1))
    with pytest.raises(Trouble, match=rf"rank 1: torchrun does not answer at 127\.0\.0\.1:{port}"):
        rendezvous_store(timeout=timedelta(hours=2))


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "MASTER_ADDR": "127.0.0.1"}])
def test_an_environment_that_describes_no_job_is_refused(environment: dict[str, str]) -> None:
    only = mock.patch.dict(os.environ, {"WORLD_SIZE": "2"} | environment, clear=True)
    missing = "MASTER_PORT" if environment else "RANK"
    says = rf"^WORLD_SIZE is 2, but .*variable {missing} expected.*; start it with torchrun, or unset WORLD_SIZE$"
    with only, pytest.raises(UserError, match=says), job(device="cpu", timeout_s=1.0):
        pass


@mock.patch.dict(os.environ, {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"})
def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    says = "process 2 has no GPU: this machine has 2; lower --nproc-per-node"
    with pytest.raises(UserError, match=says), job(device="cuda", timeout_s=1.0):
        pass


_LAUNCHER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
"""
_WORKER = """
import time
from waveform.system.signals import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended (prctl)")
def test_processes_end_with_torchrun() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job"}
    command, pipe = [sys.executable, "-c", _LAUNCHER, _WORKER], subprocess.PIPE
    # The worker keeps stderr open, so communicate returns when it has ended too.
    launcher = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        said, _ = launcher.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.kill(int(launcher.stdout.readline().split()[0]), signal.SIGKILL)
        raise
    assert "ready" in said
