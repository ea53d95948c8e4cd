"""Prepares the groups of a corpus: in this process, in processes of this machine, or with any other executor."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from waveform.audio.corpus.groups import Group, Records, prepare_group
from waveform.system.cpu import num_cores
from waveform.system.errors import UserError
from waveform.system.progress import Progress
from waveform.system.signals import SIGNALS
from waveform.system.threads import torch_in_one_thread

# Starting a process costs 2-3 s of imports, in which one core prepares this much FLAC.
_MIN_POOL_BYTES = 128 << 20
_LOSSY_SUFFIXES, _LOSSY_WEIGHT = (".mp3", ".ogg", ".opus"), 8  # the same audio in an eighth of the bytes


def run_groups(
    groups: list[Group],
    *,
    audio_dir: Path,
    data_dir: Path,
    num_workers: int | None,
    executor: Executor | None,
    show: bool,
) -> Records:
    """Prepare `groups` and return the records of all their files.

    executor: calls a function for each group; its processes must see both folders. None: this process, or if that
    pays off, `num_workers` processes of this machine.
    """
    num_workers = min(num_workers or num_cores(), len(groups))
    sizes = [(file.size, file.path.lower().endswith(_LOSSY_SUFFIXES)) for group in groups for file in group.files]
    work_bytes = sum(size * (_LOSSY_WEIGHT if is_lossy else 1) for size, is_lossy in sizes)
    opened: AbstractContextManager[Executor | None]
    if executor is not None:
        opened = nullcontext(executor)
        audio_dir, data_dir = audio_dir.absolute(), data_dir.absolute()
    elif num_workers > 1 and work_bytes >= _MIN_POOL_BYTES:
        opened = _processes(num_workers)
    else:
        opened = torch_in_one_thread()
    work = partial(prepare_group, audio_dir=audio_dir, data_dir=data_dir)
    records: Records = {}
    total_mb, start_s, audio_s = sum(size for size, _ in sizes) / 1e6, time.monotonic(), 0.0
    with opened as used, Progress("prepare", total=total_mb, unit="MB", enabled=show) as progress:
        for group, of_group in _results(groups, work, used):
            records |= of_group
            audio_s += sum(record.get("duration_s", 0) for record in of_group.values())
            progress.update(group.size / 1e6, note=f"{audio_s / (time.monotonic() - start_s):,.0f} x real time")
    return records


def _results(
    groups: list[Group], work: Callable[[Group], Records], executor: Executor | None
) -> Iterator[tuple[Group, Records]]:
    """Yield each group with what `work` returns for it, in the order in which they are done."""
    if executor is None:
        for group in groups:
            yield group, work(group)
        return
    largest_first = sorted(groups, key=lambda group: -group.size)  # so that no long file is left for the end
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited by the processes that start here
    try:
        futures = {executor.submit(work, group): group for group in largest_first}
    except OSError as error:  # "handle is closed": a process died while another was starting
        raise BrokenExecutor from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for future in as_completed(futures):
        yield futures[future], future.result()


@contextmanager
def _processes(num: int) -> Iterator[Executor]:
    """Start processes of this machine when they are needed. Raises UserError if one dies."""
    # Spawned, not forked: a forked child of a process that has run torch threads may hang.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    except BrokenExecutor as error:
        raise UserError(
            "a process that decodes audio died (killed, or out of RAM); run the same command again to continue, "
            "with data.num_workers=1 if it happens again"
        ) from error
    finally:
        # The pool does not know of a process that it was starting when another one died, and would wait for it for
        # ever. Killing them is safe: half-written files are never used.
        workers = set(multiprocessing.active_children()) - others
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
        pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    """Set up a worker process: one thread, Ctrl-C is left to the parent, and the worker ends when the parent does."""
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        parent.join()
        os._exit(1)  # if the parent is killed, no worker may go on writing

    threading.Thread(target=follow_parent, daemon=True).start()
