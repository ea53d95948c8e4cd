"""Console output besides results; a failed print never stops the work."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import TextIO


def printable(text: str) -> str:
    """Text that cannot break a line or steer a terminal: control characters, and bytes that are not UTF-8, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with a rule under its header; every row has as many cells as the header."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, ["-" * width for width in widths], *rows]
    ]


def as_table(rows: Sequence[Mapping[str, str]], *below: str) -> str:
    """Rows as text, which all have the columns of the first, and lines below them."""
    return "\n".join([*table(list(rows[0]), [list(row.values()) for row in rows]), *below])


def say(line: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print a line, on stdout by default; if that fails (a full disk, a reader that is gone), it is dropped."""
    stream = stream or sys.stdout
    try:
        print(line, end=end, file=stream, flush=True)
    except OSError:
        drop(stream.fileno())


def replace_closed() -> None:
    """Replace the streams that the shell closed with `>&-`, to which nothing can be printed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def escape_what_stdout_lacks() -> None:
    """Have stdout escape what its encoding lacks, such as bytes of a name that are not UTF-8, as stderr does."""
    if isinstance(sys.stdout, TextIOWrapper):  # not a replacement by a Python caller
        with suppress(OSError):  # this writes what a caller printed before, perhaps to a full disk
            sys.stdout.reconfigure(errors="backslashreplace")


def drop(stream: int) -> None:
    """Discard what is still to be printed there, so that it cannot fail, as Python's flush at exit would."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
