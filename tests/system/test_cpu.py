"""How many cores there are for this process, how many threads a command starts with, and waiting for a core."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from waveform.system import cpu

VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


@pytest.fixture(autouse=True)
def cores(monkeypatch: MonkeyPatch) -> None:
    """A machine of 64 cores, none of the user's settings of threads, and other defaults that change nothing here."""
    monkeypatch.setattr(cpu, "_num_visible_cores", lambda: 64)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "to be restored")
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(("limit", "expected"), [(None, 64), (0.2, 1), (1.5, 2), (2.0, 2), (100.0, 64)])
def test_a_container_has_as_many_cores_as_time(monkeypatch: MonkeyPatch, limit: float | None, expected: int) -> None:
    monkeypatch.setattr(cpu, "cpu_limit", lambda: limit)
    assert cpu.num_cores() == expected


def test_threads_are_bounded_in_a_container_only(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_limit", lambda: None)
    cpu.set_defaults()
    assert not any(variable in os.environ for variable in VARIABLES)
    monkeypatch.setattr(cpu, "cpu_limit", lambda: 1.5)
    cpu.set_defaults()
    assert [os.environ[variable] for variable in VARIABLES] == ["2", "2"]


def test_a_users_number_of_threads_is_kept(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(cpu, "cpu_limit", lambda: 1.5)
    cpu.set_defaults()
    assert os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("num_threads", "limit", "asked", "expected"),
    [
        (64, None, None, "this process may use 64 cores"),
        (32, None, None, "torch's own choice for 64 cores"),
        (2, 1.5, None, "the container has the CPU time of 1.5 of 64 cores"),
        (2, 1.5, "2", "the container has the CPU time of 1.5 of 64 cores"),  # as `set_defaults` leaves it
        (5, 1.5, "5", "OMP_NUM_THREADS=5"),
        (1, None, "1", "OMP_NUM_THREADS=1"),
        (3, None, "5", "torch's own choice for 64 cores"),  # the environment was changed too late
    ],
)
def test_it_is_said_why_there_are_so_many_threads(
    monkeypatch: MonkeyPatch, num_threads: int, limit: float | None, asked: str | None, expected: str
) -> None:
    monkeypatch.setattr(cpu, "cpu_limit", lambda: limit)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert cpu.why_threads(num_threads) == expected


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux counts how long a thread waits")
def test_four_that_share_a_core_wait_for_each_other() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]  # on the same core
    try:
        time.sleep(0.3)  # until they run
        before_s, until_s = cpu.waited_s(), time.perf_counter() + 1.0
        while time.perf_counter() < until_s:
            pass
        assert 0.55 < cpu.waited_s() - before_s < 1.5  # the loop may be late to see that its second is over
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, cores)
