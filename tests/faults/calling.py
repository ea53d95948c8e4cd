"""Calls a command in this process as a user would, under a limit of time, and tells what came of it."""

import contextlib
import io
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_ON_THE_WAY = ("warning: ", "note: ", "resumed at step ", "step ")


class TookTooLong(BaseException):
    """No `Exception`, so that nothing in the toolkit takes it for one of its own."""


@dataclass(frozen=True)
class Outcome:
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


def peak_memory_mb() -> float:
    """The most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
