"""Refusing a file that cannot be used as audio: the error with its reason, and the checks that need no decoding."""

import errno
import os
import stat
from pathlib import Path

from waveform.system.errors import UserError


class RefusedFile(UserError):
    """A file that cannot be used as audio; `reason` says why, without the file's name."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"cannot use {path}: {reason}")
        self._path, self.reason = path, reason

    def __reduce__(self) -> tuple[type, tuple[str | Path, str]]:  # so that it can be pickled
        return type(self), (self._path, self.reason)


def check_regular(path: str | Path) -> os.stat_result:
    """Return the status of a file that can be read.

    Raises RefusedFile for pipes, devices, broken or looping links, and a lack of permission.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno == errno.ENOENT:
            reason = "it is a link to nothing" if os.path.islink(path) else "no such file"
        elif error.errno == errno.ELOOP:
            reason = "its links form a loop"
        else:
            reason = error.strerror or str(error)
        raise RefusedFile(path, reason) from error
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise RefusedFile(path, f"it is {kind}, not a regular file")
    if not os.access(path, os.R_OK):
        raise RefusedFile(path, "no permission to read it")
    return status
