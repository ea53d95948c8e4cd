"""Kills processes at chosen points, many of them for the price of one import, because they are forked from one server.

A fault that is called `in_server` forks a child for each case. In a child, every lasting change of the disk is a point
at which it can be made to die.
"""

import builtins
import io
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

Process: TypeAlias = "subprocess.Popen[str]"
TIMEOUT_S = 120.0  # of one child: a hang is a failure


class Points:
    """Counts the points at which a child can be killed, and sends it signals at given ones (point -> signal)."""

    def __init__(self, signals: Mapping[int, int] | None = None) -> None:
        self._signals = signals or {}
        self.seen: list[str] = []
        self.enabled = True

    def point(self, label: str, before_death: Callable[[], None] | None = None) -> None:
        """Pass one point; only the main thread's count, because others (TensorBoard's) come at no fixed moment."""
        if not self.enabled or threading.current_thread() is not threading.main_thread():
            return
        number = self._signals.get(len(self.seen), 0)
        if number == signal.SIGKILL and before_death is not None:
            before_death()
        self.seen.append(re.sub(r"\.\d+\.partial", ".partial", label))  # without the process's id
        if number:
            os.kill(os.getpid(), number)

    def install(self) -> None:
        """Make a point of everything that this process does to the disk, and of every half-written file."""
        for name in ("replace", "rename", "unlink", "mkdir", "rmdir"):
            before(os, name, partial(self._touch, name))
        fsync = os.fsync

        def sync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file():
                self.point(f"half of {path.name}", lambda: os.truncate(path, path.stat().st_size // 2))
                self.point(f"all of {path.name}")
            fsync(descriptor) if path.is_dir() else None  # what was written survives a kill, if not a power cut

        os.fsync = sync
        real = open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            result = real(file, mode, *args, **kwargs)
            if not isinstance(file, int) and mode[0] in "wax":
                self._touch("open", file)
                if mode[0] == "a":  # such a file is not synced, so half of it is written here
                    write = result.write

                    def half(text: str) -> int:
                        def cut() -> None:
                            write(text[: len(text) // 2])
                            result.flush()

                        self._touch("half a line of", file, before_death=cut)
                        return int(write(text))

                    result.write = half
            return result

        io.open = builtins.open = opened

    def _touch(self, how: str, file: Any, *_: Any, before_death: Callable[[], None] | None = None) -> None:
        self.point(f"{how} {Path(os.fsdecode(file)).name}", before_death)


Work: TypeAlias = Callable[[Points], int | None]  # what a child does; it may make more points


def before(owner: Any, name: str, action: Callable[..., Any]) -> None:
    """Make `action` happen, with the same arguments, before every call of a function, in this process."""
    real = getattr(owner, name)

    def acting(*arguments: Any, **options: Any) -> Any:
        action(*arguments)
        return real(*arguments, **options)

    setattr(owner, name, acting)


def fork(work: Callable[[], int | None], *, output: Path | None = None) -> int:
    """Run `work` in a child, with its output in a file; return the child's id. Exit code: work's, or 70 if it fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        descriptor = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def disturbed(work: Work, log: Path, points: Points) -> int:
    """Run `work` in a child that passes `points`; if it comes to its end, `points_in(log)` are those that it passed."""

    def passing() -> int | None:
        points.install()
        code = work(points)
        points.enabled = False
        log.with_suffix(".points").write_text(json.dumps(points.seen))
        return code

    return fork(passing, output=log)


def points_in(log: Path) -> list[str]:
    """Return the points that the last child of `disturbed` passed."""
    seen: list[str] = json.loads(log.with_suffix(".points").read_text())
    return seen


def undisturbed(work: Work, log: Path) -> list[str]:
    """Run `work` in a child to its end, remove its output and return its points. Raises AssertionError if it fails."""
    assert wait(disturbed(work, log, Points())) == 0, log.read_text()
    log.unlink()
    return points_in(log)


def wait(child: int) -> int:
    """Return a child's exit code, or minus its signal's number. If it hangs, kill it and raise AssertionError."""
    with open(os.pidfd_open(child)) as process:
        in_time, _, _ = select.select([process], [], [], TIMEOUT_S)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert in_time, f"a process did not end within {TIMEOUT_S:g} s"
    return os.waitstatus_to_exitcode(status)


def spread(points: list[str], cases: int, rng: random.Random) -> list[int]:
    """Choose `cases` of the points (all if there are fewer), with as many different labels as possible."""
    order = list(range(len(points)))
    rng.shuffle(order)
    seen, rank = Counter(), {}
    for index in order:
        seen[points[index]] += 1
        rank[index] = seen[points[index]]
    return sorted(sorted(order, key=rank.__getitem__)[:cases])


def start(command: Sequence[str | Path]) -> Process:
    """Start a real process of this Python, with one thread, in a new session; one pipe carries its output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], env=env, start_new_session=True, **pipes)


def children(pid: int, *, of: str = "") -> list[int]:
    """Return the ids of a process's children whose command line contains `of`."""
    found = []
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                if of in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(int(child))
    return found


def wait_for(look: Callable[[], Any], what: str = "it never happened") -> Any:
    """Return what `look` returns once that is true. Raises AssertionError with `what` if it never is."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return found


def kill_if_there(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def free_port() -> int:
    """Return a port of this machine that is free, for ranks to meet at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def become_rank(rank: int, *, of: int, port: int) -> None:
    """Give this process the environment that torchrun would."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(of)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
