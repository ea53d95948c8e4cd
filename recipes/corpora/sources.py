"""Opens what a user has (a folder, a single file, or a zip or tar archive) as named files that are read in blocks.

Hidden files are left out: a Mac adds one to its archives for every file (__MACOSX/._NAME).
Nothing is unpacked to disk, and never more than a block is held in RAM.
"""

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from waveform.system.errors import UserError

_BLOCK_BYTES = 1 << 17  # the subword library holds 256 of them at a time while learning
_ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")
_DAMAGE = (
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    tarfile.TarError,
    lzma.LZMAError,
    NotImplementedError,  # zipfile's, for an unknown compression
    RuntimeError,  # zipfile's, for an encrypted file
)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what libraries raise as they read `what` into UserError."""
    try:
        yield
    except _DAMAGE as error:
        reason = " ".join(str(error).split())  # it may have several lines
        raise UserError(f"{what} is damaged or cut short ({reason}); fetch it again") from error
    except OSError as error:
        raise UserError(f"cannot read {what}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Source:
    """Named files, sorted by name."""

    path: Path
    sizes: Mapping[str, int]  # bytes
    open: Callable[[str], IO[bytes]]
    starts: Mapping[str, int] = field(default_factory=dict)  # bytes to skip at the start of some files

    def find(self, ending: str) -> str | None:
        """Return the one file whose path is `ending` or ends with /`ending`; None if there is none or several."""
        found = [name for name in self.sizes if name == ending or name.endswith(f"/{ending}")]
        return found[0] if len(found) == 1 else None

    @property
    def texts(self) -> list[str]:
        """Names of the .txt files that are not empty."""
        return [name for name, size in self.sizes.items() if name.lower().endswith(".txt") and size]

    def blocks(self, name: str, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield bytes start..stop - 1 of a file in blocks. Raises UserError if it is damaged or cannot be read."""
        left = self.sizes[name] - start if stop is None else stop - start
        with _explained(f"{name} of {self.path}"), self.open(name) as file:
            if first := start + self.starts.get(name, 0):
                file.seek(first)
            while left > 0:
                block = file.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise EOFError("it ends too early")
                left -= len(block)
                yield block


def open_source(path: Path) -> Source:
    """Open a folder, an archive, or any other file. Raises UserError if it is missing, unreadable or damaged."""
    with _explained(str(path)):
        if path.is_dir():
            return _folder(path)
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
        if path.suffix == ".zip":
            return _zip(path)
        if path.name.endswith(_ARCHIVES):
            return _tar(path)
        return Source(path, {path.name: path.stat().st_size}, lambda name: path.open("rb"))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _folder(path: Path) -> Source:
    """All files of a folder, nested ones by their relative path."""
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    sizes = {name: file.stat().st_size for name, file in files.items() if not _is_hidden(name)}
    return Source(path, sizes, lambda name: files[name].open("rb"))


def _zip(path: Path) -> Source:
    archive = zipfile.ZipFile(path)
    entries = sorted(archive.infolist(), key=lambda entry: entry.filename)
    shown = [entry for entry in entries if not (entry.is_dir() or _is_hidden(entry.filename))]
    return Source(path, {entry.filename: entry.file_size for entry in shown}, archive.open)


def _tar(path: Path) -> Source:
    archive = tarfile.open(path)  # noqa: SIM115  # stays open as long as its files are read
    members = {member.name.removeprefix("./"): member for member in archive.getmembers() if member.isfile()}
    # What tarfile takes for the archive's end may be a damaged header, and the checksum of gzip and others comes last.
    assert archive.fileobj is not None
    while archive.fileobj.read(_BLOCK_BYTES):
        pass

    def open_(name: str) -> IO[bytes]:
        file = archive.extractfile(members[name])
        assert file is not None
        return file

    return Source(path, {name: members[name].size for name in sorted(members) if not _is_hidden(name)}, open_)
