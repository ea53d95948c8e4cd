"""The limits that Linux control groups set for this process: how a container, a batch system or systemd bounds it.

Most files of /proc describe the whole machine, whatever share of it a container gets. The share is in files of the
control groups that the process is in, of version 1 (a tree for each controller) or 2 (one tree). Groups are nested, and
the smallest limit on the way to the root counts. See cgroups(7) and the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")  # the folder that holds /proc and /sys; tests have their own


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """RAM, without swap, that the control groups allow; None: no limit is known."""
    limits = _limits(root, "memory", v1=("memory.limit_in_bytes",), v2=("memory.max",))
    return min((limit for (limit,) in limits), default=None)


def cpu_limit(root: Path = _ROOT) -> float | None:
    """How many CPUs' time the control groups allow; None: no limit is known."""
    limits = _limits(root, "cpu", v1=("cpu.cfs_quota_us", "cpu.cfs_period_us"), v2=("cpu.max",))
    return min((quota / period for quota, period in limits), default=None)


def _limits(root: Path, controller: str, *, v1: tuple[str, ...], v2: tuple[str, ...]) -> Iterator[list[int]]:
    """The numbers in the files of each of the process's groups that has a limit, from its own up to the root.

    A container may be told the host's path of its group, although only that group is visible to it, as the root.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        tree, files = (controller, v1) if controllers else ("", v2)
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            folder = root / "sys/fs/cgroup" / tree / str(group).lstrip("/")
            words = " ".join(_text(folder / file) for file in files).split()
            if words and all(word.isdigit() for word in words):  # `max` and -1 are no limit
                yield [int(word) for word in words]


def _text(path: Path) -> str:
    """What is in a file; nothing if it cannot be read (another system, or a controller that is off)."""
    try:
        return path.read_text()
    except OSError:
        return ""
