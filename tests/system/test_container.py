"""Limits of control groups, in trees of files such as containers, batch systems and systemd make."""

from pathlib import Path

import pytest

from waveform.system import container

GIB = 1 << 30
V1_UNLIMITED = 0x7FFFFFFFFFFFF000


def tree(root: Path, *, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    """A folder with what /proc/self says, and `files` of groups, by their path below sys/fs/cgroup."""
    written = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo}
    written |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def v2(root: Path, path: str, files: dict[str, str], *, top: str = "/") -> Path:
    """A machine with version 2 only, whose process is in the group `path`; the group `top` is what is mounted."""
    mountinfo = f"29 24 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    return tree(root, cgroup=f"0::{path}", mountinfo=mountinfo, files=files)


def v1(root: Path, path: str, files: dict[str, str], *, top: str = "/") -> Path:
    """A machine with version 1, and an empty tree of version 2 beside it."""
    mountinfo = "\n".join(
        [
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755",
            f"32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
            f"33 31 0:30 {top} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory",
            "34 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        ]
    )
    return tree(
        root, cgroup=f"5:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:/\n0::/", mountinfo=mountinfo, files=files
    )


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert container.memory_limit_bytes(tmp_path) is None
    assert container.cpu_limit(tmp_path) is None


def test_a_container_of_version_2_sees_its_limits_at_the_mount_point(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", {"memory.max": str(4 * GIB), "cpu.max": "150000 100000"})
    assert container.memory_limit_bytes(root) == 4 * GIB
    assert container.cpu_limit(root) == 1.5


def test_max_is_no_limit(tmp_path: Path) -> None:
    root = v2(tmp_path, "/a", {"a/memory.max": "max", "a/cpu.max": "max 100000"})
    assert container.memory_limit_bytes(root) is None
    assert container.cpu_limit(root) is None


@pytest.mark.parametrize(
    ("outer", "inner", "smallest"), [("8", "2", 2), ("2", "8", 2), ("max", "3", 3), ("3", "max", 3)]
)
def test_the_smallest_limit_of_nested_groups_counts(tmp_path: Path, outer: str, inner: str, smallest: int) -> None:
    root = v2(
        tmp_path,
        "/job/step/task",
        {
            "job/memory.max": outer,
            "job/cpu.max": f"{outer} 1",
            "job/step/memory.max": inner,
            "job/step/cpu.max": f"{inner} 1",
            "job/step/task/memory.max": "max",
            "job/other/memory.max": "1",
            "job/other/cpu.max": "1 1",
        },
    )
    assert container.memory_limit_bytes(root) == smallest
    assert container.cpu_limit(root) == smallest


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    root = v1(
        tmp_path,
        "/docker/abc",
        {
            "memory/memory.limit_in_bytes": str(V1_UNLIMITED),
            "memory/docker/abc/memory.limit_in_bytes": str(4 * GIB),
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        },
    )
    assert container.memory_limit_bytes(root) == 4 * GIB
    assert container.cpu_limit(root) == 2.5


@pytest.mark.parametrize(
    ("path", "top"),
    [
        ("/docker/abc", "/docker/abc"),  # the container's own group is what is mounted
        ("/docker/abc", "/other"),  # the path is one of the host's, of which nothing is mounted
        ("/../../abc", "/"),  # the process came from outside of the namespace
    ],
)
def test_a_container_that_sees_the_path_of_the_host(tmp_path: Path, path: str, top: str) -> None:
    files = {"memory/memory.limit_in_bytes": str(GIB), "memory.max": str(GIB)}
    assert container.memory_limit_bytes(v1(tmp_path / "v1", path, files, top=top)) == GIB
    assert container.memory_limit_bytes(v2(tmp_path / "v2", path, files, top=top)) == GIB


def test_files_of_another_form_are_no_limit(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", {"memory.max": "", "cpu.max": "lots of it"})
    with open(root / "proc/self/cgroup", "a") as file:
        file.write("nonsense\n")
    assert container.memory_limit_bytes(root) is None
    assert container.cpu_limit(root) is None


def test_this_machine_can_be_asked() -> None:
    memory, cpu = container.memory_limit_bytes(), container.cpu_limit()
    assert memory is None or memory > 100 << 20
    assert cpu is None or cpu > 0
