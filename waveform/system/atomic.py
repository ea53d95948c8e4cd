"""Writing files so that a reader sees the old content or the new, never a part, even if the writer is killed."""

import errno
import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from waveform.system.errors import Trouble, UserError


def sync(path: Path) -> None:
    """Ask the operating system to write a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(path: Path | str | None, *, option: str) -> None:
    """Raises UserError, before any work is done, for a file that could not be written in the end."""
    if path is None:
        return
    path = Path(path)
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced
        what = "a folder" if path.is_dir() else "not a regular file"
        raise UserError(f"cannot write {option} {path}: it is {what}; give the name of a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())  # those below it will be made
    if not folder.is_dir():
        raise UserError(f"cannot write {option} {path}: {folder} is a file, not a folder; choose another folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {option} {path}: no permission to write in {folder}; choose another folder")


def write_file(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step. Raises UserError if the disk is full or the folder read-only.

    What a process killed while writing `path` left behind is removed.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with explain_write_errors(path):
        drop_leftovers(path)
        try:
            with open(partial, "wb") as file:
                with suppress(OSError):  # a file system may have no locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shows that the writer is alive
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)
            sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def drop_leftovers(path: Path) -> None:
    """Remove partial files of `path` that no living process is writing."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        if not is_held(leftover):
            leftover.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of a file, as its writer does."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:  # another user's, or a file system without locks: better left alone
        return True


def write_all(file: FileIO, content: bytes) -> None:
    """Write `content` to a file opened without a buffer, of which one write may take only a part."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


@contextmanager
def explain_write_errors(path: Path, *, then: str = "run the same command again") -> Iterator[None]:
    """Turn the operating system's refusal to write into one line that names the file and the remedy.

    then: what to do once there is space. Raises UserError for what the user can fix, and Trouble for the rest, like a
    failing disk. A pipe whose reader is gone is neither and stays a BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reasons = {
            errno.ENOSPC: f"the disk is full; free some space and {then}",
            errno.EDQUOT: f"the disk quota is used up; free some space and {then}",
            errno.EACCES: "no permission to write there; choose another folder",
            errno.EROFS: "the file system is read-only; choose another folder",
            errno.EFBIG: "the file would exceed the size limit of this system",
            errno.ENOTDIR: "a part of that path is a file, not a folder; choose another folder",
            errno.ENOENT: "its folder does not exist; create it, or choose another",
            errno.EMFILE: "too many files are open; ask for fewer at once, or for more with `ulimit -n`",
            errno.EISDIR: "a folder has that name; choose another name",
            errno.EEXIST: "a file has that name; choose another folder",
            errno.ENOTEMPTY: "a folder with that name is not empty; choose another",
        }
        if error.errno not in reasons:
            what = (error.strerror or str(error)).lower()
            raise Trouble(
                f"cannot write {path}: {what}; check that its disk or network drive works, or use another"
            ) from error
        raise UserError(f"cannot write {path}: {reasons[error.errno]}") from error
