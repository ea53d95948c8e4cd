"""Ranks find the others of their attempt, whatever an earlier one left in torchrun's store."""

import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from waveform.ranks.rendezvous import agree_on_prefix, rendezvous_store
from waveform.system.errors import Trouble


def attempt(store: dist.Store, order: list[int]) -> set[str]:
    """The prefixes that ranks agree on if they start in this order, a moment after each other."""
    prefixes: set[str] = set()

    def meet(rank: int) -> None:
        prefixes.add(agree_on_prefix(store, rank, len(order), timeout=timedelta(seconds=20)))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join()
    return prefixes


def test_each_attempt_has_its_own_prefix() -> None:
    store = dist.HashStore()
    found = [attempt(store, order) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1])]
    assert [len(prefixes) for prefixes in found] == [1] * 4
    assert len(set.union(*found)) == 4


def test_a_rank_that_does_not_come_is_reported() -> None:
    store = dist.HashStore()
    attempt(store, [0, 1])
    with pytest.raises(dist.DistStoreError, match="the other 1 ranks of the job did not come"):
        agree_on_prefix(store, 0, 2, timeout=timedelta(seconds=0.3))


def test_torchrun_that_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end while it starts its processes; they must not wait for it for hours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(Trouble, match=rf"rank 1: torchrun does not answer at 127\.0\.0\.1:{port}"):
        rendezvous_store(1, 2, timeout=timedelta(hours=2))


_LAUNCHER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
"""
_WORKER = """
import time
from waveform.system.signals import end_with_launcher
end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent ended (prctl)"
)
def test_processes_end_with_torchrun() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job"}
    # The worker keeps stderr open, so communicate returns when it has ended too.
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _WORKER],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said, _ = launcher.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.kill(int(launcher.stdout.readline().split()[0]), signal.SIGKILL)
        raise
    assert "ready" in said
