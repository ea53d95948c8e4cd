"""Runs cases in separate processes, forked from a server that has imported everything but computed nothing."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


def start(function: Callable[..., Any], *arguments: Any, output: Path, daemon: bool = True) -> Any:
    """Start `function(*arguments)` in a new process; its stdout and stderr go to `output`.

    daemon: whether it ends with this process; it can then start no pool of processes.
    """
    process = _context.Process(target=_child, args=(function, arguments, output), daemon=daemon)
    process.start()
    return process


def run(
    function: Callable[..., Any], *arguments: Any, output: Path, timeout_s: float | None = 120, daemon: bool = True
) -> str:
    """Run it to its end and return what it printed. Raises AssertionError, with that, if it failed or hung."""
    process = start(function, *arguments, output=output, daemon=daemon)
    process.join(timeout_s)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    printed = output.read_text(errors="replace")
    assert code == 0, f"{function.__name__}{arguments}: {'hung' if code is None else f'exit code {code}'}\n{printed}"
    return printed


def _child(function: Callable[..., Any], arguments: Sequence[Any], output: Path) -> None:
    torch.set_num_threads(1)
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout.reconfigure(line_buffering=True)  # a traceback then comes after it, and ends with the case that failed
    function(*arguments)
