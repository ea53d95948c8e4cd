"""Opens what a user has (a folder, a single file, or a zip or tar archive) as named files that are read in blocks.

Nothing is unpacked to disk, and never more than a block is held in RAM.
"""

import lzma
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from waveform.system.errors import UserError

_BLOCK_BYTES = 1 << 17  # the subword library holds 256 of them at a time while learning
_ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    tarfile.TarError,
    lzma.LZMAError,
    NotImplementedError,  # zipfile's, for an unknown compression
    RuntimeError,  # zipfile's, for an encrypted file
)


def _one_line(error: Exception) -> str:
    """Return a library's message, which may have several lines, as one."""
    return " ".join(str(error).split())


class Source(ABC):
    """Named files, sorted by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sizes: dict[str, int] = {}  # bytes

    @abstractmethod
    def _open(self, name: str) -> IO[bytes]: ...

    def find(self, ending: str) -> str | None:
        """Return the one file whose path is `ending` or ends with /`ending`; None if there is none or several."""
        found = [name for name in self.sizes if name == ending or name.endswith(f"/{ending}")]
        return found[0] if len(found) == 1 else None

    def blocks(self, name: str, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield bytes start..stop - 1 of a file in blocks. Raises UserError if it is damaged or cannot be read."""
        left = self.sizes[name] - start if stop is None else stop - start
        try:
            with self._open(name) as file:
                if start:
                    file.seek(start)
                while left > 0:
                    block = file.read(min(left, _BLOCK_BYTES))
                    if not block:
                        raise EOFError("it ends too early")
                    left -= len(block)
                    yield block
        except _DAMAGE as error:
            raise UserError(
                f"{self.path}: {name} is damaged or cut short ({_one_line(error)}); fetch it again"
            ) from error
        except OSError as error:
            raise UserError(f"cannot read {name} of {self.path}: {error.strerror or error}") from error


class FolderSource(Source):
    """All files of a folder, nested ones by their relative path, except hidden ones."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for file in sorted(path.rglob("*")):
            relative = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                self.sizes[relative.as_posix()] = file.stat().st_size

    def _open(self, name: str) -> IO[bytes]:
        return open(self.path / name, "rb")


class FileSource(Source):
    """A single file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sizes[path.name] = path.stat().st_size

    def _open(self, name: str) -> IO[bytes]:
        return open(self.path, "rb")


class ZipSource(Source):
    """The files in a zip archive."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._archive = zipfile.ZipFile(path)
        for entry in sorted(self._archive.infolist(), key=lambda entry: entry.filename):
            if not entry.is_dir():
                self.sizes[entry.filename] = entry.file_size

    def _open(self, name: str) -> IO[bytes]:
        return self._archive.open(name)


class TarSource(Source):
    """The files in a tar archive, compressed or not."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._archive = tarfile.open(path)  # noqa: SIM115  # stays open as long as its files are read
        members = [member for member in self._archive.getmembers() if member.isfile()]
        self._members = {member.name.removeprefix("./"): member for member in members}
        self.sizes = {name: self._members[name].size for name in sorted(self._members)}

    def _open(self, name: str) -> IO[bytes]:
        file = self._archive.extractfile(self._members[name])
        assert file is not None
        return file


def open_source(path: Path) -> Source:
    """Open a folder, an archive, or any other file. Raises UserError if it is missing, unreadable or damaged."""
    try:
        if path.is_dir():
            return FolderSource(path)
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
        if path.suffix == ".zip":
            return ZipSource(path)
        if path.name.endswith(_ARCHIVES):
            return TarSource(path)
        return FileSource(path)
    except _DAMAGE as error:
        raise UserError(f"{path} is damaged or cut short ({_one_line(error)}); fetch it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
