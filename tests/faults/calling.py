"""Calls a command in this process as a user would, under a limit of time, and tells what came of it."""

import contextlib
import io
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_ON_THE_WAY = ("warning: ", "note: ", "resumed at step ", "step ")


class TookTooLong(BaseException):
    """No `Exception`, so that nothing in the toolkit takes it for one of its own."""


class Outcome(NamedTuple):
    """What a command did."""

    code: int | None  # None: an exception came out of it, which a user sees as a traceback
    out: str
    err: str

    @property
    def is_one_line_error(self) -> bool:
        """Whether it refused as it should: exit code 2, and one line behind what it says on its way."""
        lines = [line for line in self.err.splitlines() if not line.startswith(_ON_THE_WAY)]
        return self.code == 2 and len(lines) == 1 and "Traceback" not in self.err


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TookTooLong in the main thread."""

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
    """Run `main` on `arguments`; an exception, and one that takes longer than `seconds`, is told as code None."""
    # As Python makes them for a command: what cannot be encoded is an error on the one, escaped on the other.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    code: int | None = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with time_limit(seconds):
                code = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc(file=err)
    return Outcome(code, _text(out), _text(err))


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def process_memory_mb(field: str, process: int | str = "self") -> float:
    """A field of /proc/PROCESS/status: VmData, VmHWM, ...; 0 for a process that has ended and waits to be noticed."""
    found = re.search(rf"^{field}:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def peak_memory_mb(process: int | str = "self") -> float:
    """The most memory that a process has held since it was started, or since `forget_peak_memory`.

    `ru_maxrss` begins at the size of the process that started this one, and cannot be forgotten.
    """
    return process_memory_mb("VmHWM", process)


def forget_peak_memory() -> float:
    """Count this process's peak anew, so that what grows is not hidden by what was once larger; returns it, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_mb()
