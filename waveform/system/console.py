"""What is printed besides results: work does not end because nobody can hear of it."""

import os
import sys
from typing import TextIO


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line, on stdout by default; where that fails (a full disk, a reader that is gone) it is left out."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except OSError:
        drop(stream.fileno())


def replace_closed() -> None:
    """Give Python streams in place of those that the shell closed with `>&-`, to which nothing can be printed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def drop(stream: int) -> None:
    """Let nothing that is still to be printed there fail, as Python's own flush at its end would."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
