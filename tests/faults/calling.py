"""Calls a command in this process as a user would, with a time limit, and reports what it did."""

import contextlib
import io
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_BESIDES = ("warning: ", "note: ", "resumed at step ", "step ")


class TookTooLong(BaseException):
    """Not an `Exception`, so that nothing in the toolkit mistakes it for one of its own."""


class Outcome(NamedTuple):
    """What a command did."""

    code: int | None  # None: it raised an exception, which a user would see as a traceback
    out: str
    err: str

    def refused(self, context: str) -> bool:
        """Whether it refused as it should: exit code 2 and one line, besides warnings, notes and the like.

        Raises AssertionError, with `context`, if it failed in another way.
        """
        lines = [line for line in self.err.splitlines() if not line.startswith(_BESIDES)]
        is_one_line = self.code == 2 and len(lines) == 1 and "Traceback" not in self.err
        assert self.code == 0 or is_one_line, f"no single line of code 2 but {self.code}: {context}\n{self.err[-3000:]}"
        return is_one_line


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the main thread once the time is up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(main: Callable[[Sequence[str]], int], arguments: Sequence[str | Path], *, seconds: float = 60) -> Outcome:
    """Run `main` on `arguments`. If it raises an exception or takes longer than `seconds`, the code is None."""
    # As Python makes them for a command: what cannot be encoded is an error on stdout and escaped on stderr.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    code: int | None = None
    torch.set_num_threads(1)  # results depend on it, and the previous command may have changed it
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with time_limit(seconds):
                code = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc(file=err)
    for stream in (out, err):
        stream.seek(0)
    return Outcome(code, out.read(), err.read())


def must_work(main: Callable[[Sequence[str]], int], arguments: Sequence[str | Path], *, seconds: float = 60) -> Outcome:
    """The same, of a command that must succeed."""
    outcome = call(main, arguments, seconds=seconds)
    assert outcome.code == 0, outcome.err
    return outcome


def process_memory_mb(field: str, process: int | str = "self") -> float:
    """Return a field of /proc/PROCESS/status (VmData, VmHWM, ...) in MB; 0 if the process is a zombie."""
    found = re.search(rf"^{field}:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def peak_memory_mb(process: int | str = "self") -> float:
    """Return the most RAM, in MB, that a process has held since it was started or since `forget_peak_memory`.

    `ru_maxrss` begins at the size of the process that started this one, and cannot be forgotten.
    """
    return process_memory_mb("VmHWM", process)


def forget_peak_memory() -> float:
    """Start counting this process's peak anew, so that an earlier peak hides nothing; return it, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_mb()
