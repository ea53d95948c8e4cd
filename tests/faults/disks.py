"""Small real disks: a tmpfs of few pages or inodes or, if none can be mounted, a limit on the size of files."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # of unshare(2)
_PRIVATE, _BIND, _REMOUNT, _READ_ONLY, _DETACH = 1 << 18 | 1 << 14, 4096, 32, 1, 2  # of mount(2) and umount2
PAGE = os.sysconf("SC_PAGE_SIZE")


def _libc(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


class SmallDisk:
    """The folder `place` as a disk of `pages` and `inodes` that only this process sees; `grow()` makes it large.

    `kind` says what it is. A process makes one at most; it goes away with the process.
    """

    def __init__(self, place: Path, *, pages: int | None, inodes: int | None = None) -> None:
        place.mkdir()
        self._place = os.fsencode(place)
        try:
            _own_mounts()
            size = "size=1g" if pages is None else f"size={pages * PAGE}"
            _libc("mount", b"none", self._place, b"tmpfs", 0, f"{size},nr_inodes={inodes or 10_000}".encode())
            self.kind = "tmpfs"
        except OSError:
            # Whatever writes a file, the kernel refuses the byte beyond the limit. There is no such limit on inodes.
            limit = (PAGE if pages is None else pages * PAGE) // 4
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            self.kind = "limit"

    def grow(self) -> None:
        if self.kind == "tmpfs":
            _libc("mount", b"none", self._place, b"tmpfs", _REMOUNT, b"size=1g,nr_inodes=10000")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    @property
    def reason(self) -> str:
        """What the toolkit must say about it."""
        return "the disk is full; free some space" if self.kind == "tmpfs" else "exceed the size limit"


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Every path into `folder` is read-only meanwhile. Works only if a tmpfs could be mounted."""
    place = os.fsencode(folder)
    _libc("mount", place, place, None, _BIND, None)
    _libc("mount", None, place, None, _BIND | _REMOUNT | _READ_ONLY, None)
    yield
    _libc("umount2", place, _DETACH)


def _own_mounts() -> None:
    uid, gid = os.getuid(), os.getgid()
    try:
        _libc("unshare", _NEW_MOUNTS)
    except OSError:
        _libc("unshare", _NEW_USER | _NEW_MOUNTS)
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", name).write_text(content)
    _libc("mount", b"none", b"/", None, _PRIVATE, None)
