"""Locks of folders and files, which the system releases when their holder ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waveform.system.atomic import explain_write_errors
from waveform.system.errors import UserError

_PATIENCE_S = 1.0
_POLL_S = 0.01


def take_lock(descriptor: int) -> None:
    """Take the lock of an open file or folder, until it is closed or this process ends.

    Raises BlockingIOError if another process holds it. One that was killed while starting a process may seem to hold it
    a moment longer: the new process shares the lock until it has closed what it inherited.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


@contextmanager
def locked(path: Path, *, refusal: str) -> Iterator[int]:
    """Hold the lock of a folder, or of a file, which is made if it does not exist; yields its descriptor.

    The system releases the lock when this process ends, however it ends. Raises UserError with the text `refusal` if
    another process holds it.
    """
    with explain_write_errors(path):
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            take_lock(descriptor)
        except BlockingIOError:
            raise UserError(refusal) from None
        yield descriptor
    finally:
        os.close(descriptor)
