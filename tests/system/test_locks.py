"""Locks that a killed process's child still shares, and locks that stay held."""

import os
import time

import pytest

from waveform.system.locks import take_lock


def _hold(path, seconds):
    """Have a child hold the lock that this process took and closed, as one does between fork and exec; its id."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    take_lock(descriptor)
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os._exit(0)
    os.close(descriptor)
    return child


def test_lock_of_a_dead_process_is_waited_for_while_its_child_starts(tmp_path):
    child = _hold(tmp_path / "lock", 0.2)
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    take_lock(descriptor)
    os.close(descriptor)
    os.waitpid(child, 0)


@pytest.mark.slow
def test_lock_that_stays_held_is_refused_soon(tmp_path):
    child = _hold(tmp_path / "lock", 3.0)
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        take_lock(descriptor)
    assert time.monotonic() - began < 2.5
    os.close(descriptor)
    os.waitpid(child, 0)
