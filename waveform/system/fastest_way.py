"""Which of several ways to compute the same is the fastest on this processor: timed once, and kept on disk.

How fast a library or a kernel is follows from a processor's units and caches, and a processor's name does not tell.
Ways differ in rounding: a training records what it took, and takes the same again (engine/resume_notes.py).
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from waveform.system.atomic import write_file
from waveform.system.console import say
from waveform.system.errors import UserError
from waveform.system.machine import cpu_name

SETTING = "WAVEFORM_TIMED_WAYS"  # 0 in the environment: nothing is timed, or read from disk
_MIN_GAIN = 1.05  # of a way over the first; less may be noise
_TURNS = 9

questions: "dict[str, Question]" = {}  # by name, of the modules that are loaded
taken: dict[str, str] = {}  # of questions: the way that this process takes


@dataclass(frozen=True)
class Question:
    """A computation that can be done in several ways."""

    name: str
    ways: tuple[str, ...]  # the first is taken if nothing is timed
    calls: Callable[[], Mapping[str, Callable[[], object]]]  # of the ways that there are here, at a typical size

    def __post_init__(self) -> None:
        questions[self.name] = self


def fastest_way(question: Question) -> str:
    """The way to take. At its first use on a machine the ways are timed, in seconds, which a line on stderr says."""
    if question.name not in taken:
        if os.environ.get(SETTING) == "0":
            return question.ways[0]
        taken[question.name] = _find(question)
    return taken[question.name]


def _find(question: Question) -> str:
    file = _file()
    table: dict[str, dict[str, str]] = {}  # of processors and versions, of questions: the way
    with suppress(OSError, msgspec.MsgspecError):  # nothing if it cannot be read, or was not written here
        table = msgspec.json.decode(b"" if file is None else file.read_bytes(), type=dict[str, dict[str, str]])
    instructions, numba = torch.backends.cpu.get_cpu_capability(), version("numba")
    kept = table.setdefault(f"{cpu_name()}, {instructions}, torch {torch.__version__}, numba {numba}", {})
    if kept.get(question.name) in question.ways:
        return kept[question.name]
    seconds = _time(question.calls)
    best = min(seconds, key=seconds.__getitem__)
    if seconds[question.ways[0]] < _MIN_GAIN * seconds[best]:
        best = question.ways[0]
    if os.environ.get("RANK", "0") == "0":
        figures = ", ".join(f"{way} {1000 * each:.1f} ms" for way, each in seconds.items())
        say(f"{question.name} by {best} here, timed once: {figures} ({SETTING}=0 turns this off)", sys.stderr)
    kept[question.name] = best
    if file is not None:
        with suppress(UserError):  # the next process times again
            write_file(file, msgspec.json.format(msgspec.json.encode(table)) + b"\n")
    return best


def _file() -> Path | None:
    """In the folder in which numba keeps what it compiles; None if there is none that can be written to."""
    import numba  # here: it takes a while

    try:
        return Path(numba.njit(cache=True)(_file).stats.cache_path) / "fastest_ways.json"
    except RuntimeError:
        return None


def _time(make: Callable[[], Mapping[str, Callable[[], object]]]) -> dict[str, float]:
    """Seconds that each way takes: medians of calls in turn, by the clock of this thread, whatever else is running."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others would not be on the clock
    try:
        with torch.inference_mode(False), torch.enable_grad():
            calls = make()
            seconds: dict[str, list[float]] = {way: [] for way in calls}
            for turn in range(1 + _TURNS):
                for way, call in calls.items():
                    began = time.thread_time()
                    call()
                    if turn:  # the first one compiles, and loads libraries
                        seconds[way].append(time.thread_time() - began)
    finally:
        torch.set_num_threads(num_threads)
    return {way: statistics.median(each) for way, each in seconds.items()}
