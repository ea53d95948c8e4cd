"""Limits of control groups, in trees of files such as containers, batch systems and systemd make."""

from pathlib import Path

import pytest

from tests.recipes.corpus_files import write_folder
from waveform.system import container

GIB = 1 << 30
V1_UNLIMITED = 0x7FFFFFFFFFFFF000
Limits = tuple[int | None, float | None]


def limits(root: Path, cgroup: str, files: dict[str, str]) -> Limits:
    """RAM and CPUs that are allowed if /proc/self says `cgroup`, and groups have `files`, by path in sys/fs/cgroup."""
    written = {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    write_folder(root, {name: text + "\n" for name, text in written.items()})
    return container.memory_limit_bytes(root), container.cpu_limit(root)


def v1_limits(root: Path, path: str, files: dict[str, str]) -> Limits:
    """On a machine with version 1, and an empty tree of version 2 beside it, in the group `path`."""
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu").symlink_to("cpu,cpuacct")  # as systemd and container engines make it
    return limits(root, f"5:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:/\n0::/", files)


@pytest.mark.parametrize(
    ("path", "files", "expected"),
    [
        ("/", {}, (None, None)),
        ("/", {"memory.max": str(4 * GIB), "cpu.max": "150000 100000"}, (4 * GIB, 1.5)),  # as a container sees its own
        ("/a", {"a/memory.max": "max", "a/cpu.max": "max 100000"}, (None, None)),
        ("/", {"memory.max": "", "cpu.max": "lots of it"}, (None, None)),
    ],
)
def test_limits_of_version_2(tmp_path: Path, path: str, files: dict[str, str], expected: Limits) -> None:
    assert limits(tmp_path, f"0::{path}\nnonsense", files) == expected


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert container.memory_limit_bytes(tmp_path) is container.cpu_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("outer", "inner", "smallest"), [("8", "2", 2), ("2", "8", 2), ("max", "3", 3), ("3", "max", 3)]
)
def test_the_smallest_limit_of_nested_groups_counts(tmp_path: Path, outer: str, inner: str, smallest: int) -> None:
    memory = {"job": outer, "job/step": inner, "job/step/task": "max", "job/other": "1"}
    cpu = {"job": f"{outer} 1", "job/step": f"{inner} 1", "job/other": "1 1"}
    files = {f"{group}/memory.max": text for group, text in memory.items()}
    files |= {f"{group}/cpu.max": text for group, text in cpu.items()}
    assert limits(tmp_path, "0::/job/step/task", files) == (smallest, smallest)


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": str(V1_UNLIMITED),
        "memory/docker/abc/memory.limit_in_bytes": str(4 * GIB),
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
        "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
    }
    assert v1_limits(tmp_path, "/docker/abc", files) == (4 * GIB, 2.5)


@pytest.mark.parametrize("path", ["/docker/abc", "/../../abc"])  # of a process from outside of the namespace
def test_a_container_that_sees_the_path_of_the_host(tmp_path: Path, path: str) -> None:
    """Of the host's groups it sees nothing but its own, as the root."""
    files = {"memory/memory.limit_in_bytes": str(GIB), "memory.max": str(GIB)}
    assert v1_limits(tmp_path / "v1", path, files)[0] == GIB
    assert limits(tmp_path / "v2", f"0::{path}", files)[0] == GIB


def test_a_group_of_another_controller_does_not_count(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": str(4 * GIB), "memory/other/memory.limit_in_bytes": str(GIB)}
    cgroup = "5:memory:/\n1:name=systemd:/other\n3:pids:/other"
    assert limits(tmp_path, cgroup, files)[0] == 4 * GIB


def test_this_machine_can_be_asked() -> None:
    memory, cpu = container.memory_limit_bytes(), container.cpu_limit()
    assert memory is None or memory > 100 << 20
    assert cpu is None or cpu > 0
