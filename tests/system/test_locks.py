"""Locks that a killed process's child still shares, and locks that stay held."""

import os
import time
from pathlib import Path

import pytest

from waveform.system.errors import UserError
from waveform.system.locks import locked


def _hold(path: Path, seconds: float) -> int:
    """Have a child hold the lock that this process took and closed, as one does between fork and exec; its id."""
    with locked(path, refusal="held"):
        child = os.fork()
        if child == 0:
            time.sleep(seconds)
            os._exit(0)
    return child


def test_lock_of_a_dead_process_is_waited_for_while_its_child_starts(tmp_path: Path) -> None:
    child = _hold(tmp_path / "lock", 0.2)
    with locked(tmp_path / "lock", refusal="held"):
        os.waitpid(child, 0)


@pytest.mark.slow
def test_lock_that_stays_held_is_refused_soon(tmp_path: Path) -> None:
    child = _hold(tmp_path / "lock", 3.0)
    began = time.monotonic()
    with pytest.raises(UserError, match="held"), locked(tmp_path / "lock", refusal="held"):
        pass
    assert time.monotonic() - began < 2.5
    os.waitpid(child, 0)
