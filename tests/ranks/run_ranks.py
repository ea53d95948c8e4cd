"""Runs a function as every rank of a job on this machine, each in a separate process."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.faults import forks, forkserver
from waveform.ranks.distributed import World, job


def run_ranks(
    work: Callable[..., Any], size: int, folder: Path, *, timeout_s: float = 120, patience_s: float = 240
) -> None:
    """Call `work(world, folder)` on every rank; what rank r prints goes to `said_r` in the folder.

    timeout_s: of the job; patience_s: for all that it does. Raises AssertionError, with what a rank said, if one fails.
    """
    port, files = forks.free_port(), [folder / f"said_{rank}" for rank in range(size)]
    ranks = [
        forkserver.start(_rank, work, (rank, size, port), folder, timeout_s, output=file)
        for rank, file in enumerate(files)
    ]
    try:
        for rank, (process, file) in enumerate(zip(ranks, files, strict=True)):
            process.join(patience_s)
            assert process.exitcode == 0, f"rank {rank}: {process.exitcode}: {file.read_text()}"
    finally:
        for process in ranks:
            process.kill()


def command_on_ranks(program: str, arguments: Sequence[Any], folder: Path, *, size: int = 2) -> str:
    """What `torchrun --nproc-per-node=SIZE -m PROGRAM ARGUMENTS` says, without the time that its imports take."""
    folder.mkdir(exist_ok=True)
    run_ranks(partial(_command, program, [str(argument) for argument in arguments]), size, folder)
    return "".join((folder / f"said_{rank}").read_text() for rank in range(size))


def _command(program: str, arguments: list[str], world: World, folder: Path) -> None:
    assert import_module(f"{program}.cli").main(arguments) == 0


def _rank(work: Callable[..., Any], place: tuple[int, int, int], folder: Path, timeout_s: float) -> None:
    rank, size, port = place
    forks.become_rank(rank, of=size, port=port)
    with job(device="cpu", timeout_s=timeout_s) as world:
        work(world, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything is written; the tests do not care how gloo's threads end
