"""Locks of folders and files: whoever holds one lives."""

import fcntl
import time

_PATIENCE_S = 1.0
_POLL_S = 0.01


def take_lock(descriptor: int) -> None:
    """Take the lock of an open file or folder, until it is closed or this process ends.

    Raises BlockingIOError where another process holds it. One that was killed while it started a process may seem to
    for a moment longer: what it started shares the lock until it has closed what it inherited.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)
