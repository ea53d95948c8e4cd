"""Locks of folders and files, which the system releases when their holder ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waveform.system.atomic import explain_write_errors
from waveform.system.errors import UserError

# A process that was killed while it started another may seem to hold a lock a moment longer: the new process shares it
# until it has closed what it inherited.
_PATIENCE_S = 1.0
_POLL_S = 0.01


@contextmanager
def locked(path: Path, *, refusal: str, patience_s: float = _PATIENCE_S) -> Iterator[int]:
    """Hold the lock of a folder, or of a file, which is made if it does not exist; yields its descriptor.

    The system releases the lock when this process ends, however it ends. Raises UserError with the text `refusal` if
    another process holds it for longer than `patience_s`.
    """
    with explain_write_errors(path):
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(refusal) from None
            time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)
