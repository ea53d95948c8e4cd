"""The limits that Linux control groups set for this process: how a container, a batch system or systemd bounds it.

Most files of /proc describe the whole machine, whatever share of it a container gets. The share is in files of the
control groups that the process is in, of version 1 (a tree for each controller) or 2 (one tree). Groups are nested, and
the smallest limit on the way to the root counts. See cgroups(7) and the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")  # the folder that holds /proc; tests have their own
# Files of a group's folder, in version 1 and in version 2. What is not a number (`max`, -1) is no limit.
_MEMORY = (("memory.limit_in_bytes",), ("memory.max",))
_CPU = (("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",))


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """RAM, without swap, that the control groups allow; None: no limit is known."""
    return min((limit for (limit,) in _limits(root, "memory", _MEMORY)), default=None)


def cpu_limit(root: Path = _ROOT) -> float | None:
    """How many CPUs' time the control groups allow; None: no limit is known."""
    return min((quota / period for quota, period in _limits(root, "cpu", _CPU)), default=None)


def _limits(root: Path, controller: str, versions: tuple[tuple[str, ...], ...]) -> Iterator[list[int]]:
    """The numbers in the files of each group that has a limit."""
    for folder in _groups(root, controller):
        for files in versions:
            words = " ".join(_text(folder / file) for file in files).split()
            if words and all(word.isdigit() for word in words):
                yield [int(word) for word in words]


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process's groups, from its own up to the root of what is mounted."""
    memberships = _memberships(root)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        # ID PARENT DEVICE GROUP MOUNT-POINT OPTIONS [...] - TYPE SOURCE CONTROLLERS, see proc_pid_mountinfo(5)
        mount, _, system = line.partition(" - ")
        if system.startswith("cgroup2 "):
            path = memberships.get("")
        elif system.startswith("cgroup ") and controller in system.split()[-1].split(","):
            path = memberships.get(controller)
        else:
            continue
        if path is None:
            continue
        top, mount_point = mount.split()[3:5]
        # A container may see the host's path, but nothing of the host's tree beside what is mounted.
        below = path.relative_to(top) if path.is_relative_to(top) else PurePosixPath()
        for group in (below, *below.parents):
            yield root / mount_point.lstrip("/") / group


def _memberships(root: Path) -> dict[str, PurePosixPath]:
    """The path of the process's group in the tree of each controller; version 2's only tree has the name ""."""
    rows = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    return {name: PurePosixPath(row[2]) for row in rows if len(row) == 3 for name in row[1].split(",")}


def _text(path: Path) -> str:
    """What is in a file; nothing if it cannot be read (another system, or a controller that is off)."""
    try:
        return path.read_text()
    except OSError:
        return ""
