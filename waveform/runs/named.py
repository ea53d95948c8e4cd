"""Finds the run that a user names: a run folder, an exported run, one on a hub or a bundled one."""

import atexit
import shutil
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from waveform.runs.archive import unpack
from waveform.runs.hub import download, is_hub, is_hub_name, unpack_hub
from waveform.system.atomic import explain_write_errors
from waveform.system.errors import UserError, alias_in_messages

BUNDLED = Path(str(resources.files("waveform.bundled")))
_unpacked: dict[tuple[Path, int, int], Path] = {}  # archive, time, size -> the folder that it was unpacked into


def find_run(given: Path | str) -> Path:
    """The folder of the run that `given` names; that of an archive is temporary, and stays until this process ends.

    Raises UserError if there is none, naming the bundled runs, and for an archive of anything but a run.
    """
    path = Path(given)
    if is_hub_name(given):
        return _unpack_once(download(given), unpack=partial(unpack_hub, follow_links=True))
    if path.is_dir():
        return _unpack_once(path, unpack=unpack_hub) if is_hub(path) else path
    if path.is_file():
        return _unpack_once(path)
    if is_bundled(given):
        return _unpack_once(BUNDLED / f"{given}.zip")
    if path.exists():
        raise UserError(f"{given} is neither a run folder nor an archive of one")
    bundled = ", ".join(bundled_names())
    raise UserError(f"no such run folder: {given}; `train` makes one, and waveform comes with {bundled}")


def bundled_names() -> list[str]:
    """Names of the runs that come with waveform, sorted."""
    return sorted(path.stem for path in BUNDLED.glob("*.zip"))


def is_bundled(given: Path | str) -> bool:
    """Whether `given` names a run that comes with waveform: a folder or file of that name takes precedence."""
    return str(given) in bundled_names() and not Path(given).exists()


def full_name(given: Path | str) -> str:
    """Return a name that means the same run in any working directory."""
    return str(given) if is_bundled(given) or is_hub_name(given) else str(Path(given).resolve())


def temporary_folder() -> Path:
    """A new folder, removed when this process ends. Raises UserError if the disk is full or read-only."""
    with explain_write_errors(Path(gettempdir())):
        folder = Path(mkdtemp(prefix="waveform-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _unpack_once(archive: Path, *, unpack: Callable[[Path, Path], None] = unpack) -> Path:
    """Unpack an archive, or a hub's folder, into a temporary folder of the same name, which is the run's name too."""
    status = archive.stat()
    key = (archive.resolve(), status.st_mtime_ns, status.st_size)
    if key not in _unpacked:
        place = temporary_folder()
        try:
            unpack(archive, place / archive.stem)
        except BaseException:  # leave nothing of a refused archive, because the program may go on
            shutil.rmtree(place, ignore_errors=True)
            raise
        _unpacked[key] = place / archive.stem
        alias_in_messages(_unpacked[key], archive)
    return _unpacked[key]
