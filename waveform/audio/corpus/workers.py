"""Prepares the groups of a corpus: in this process, or in a pool of processes if that pays off."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import torch

from waveform.audio.corpus.groups import Group, GroupResult, prepare_group
from waveform.system.cpu import num_cores
from waveform.system.errors import UserError
from waveform.system.progress import Progress
from waveform.system.signals import SIGNALS
from waveform.system.threads import torch_in_one_thread

# Starting a process costs 2-3 s of imports, in which one core prepares this much FLAC.
_MIN_POOL_BYTES = 128 << 20
_LOSSY_SUFFIXES, _LOSSY_WEIGHT = (".mp3", ".ogg", ".opus"), 8  # the same audio in an eighth of the bytes


def run_groups(
    groups: list[Group], *, audio_dir: Path, data_dir: Path, num_workers: int | None, show: bool
) -> dict[str, GroupResult]:
    """Prepare `groups`, in a pool of processes if that pays off. Returns the results by group key."""
    num_workers = min(num_workers or num_cores(), len(groups))
    total_bytes = sum(group.size for group in groups)
    lossy_bytes = sum(
        file.size for group in groups for file in group.files if file.path.lower().endswith(_LOSSY_SUFFIXES)
    )
    work_bytes = total_bytes + (_LOSSY_WEIGHT - 1) * lossy_bytes
    results: dict[str, GroupResult] = {}
    start_s = time.monotonic()
    with Progress("prepare", total=total_bytes / 1e6, unit="MB", enabled=show) as progress:

        def finish(group: Group, result: GroupResult) -> None:
            results[group.key] = result
            audio_s = sum(done.duration_s for done in results.values())
            progress.update(group.size / 1e6, note=f"{audio_s / (time.monotonic() - start_s):,.0f}x real time")

        if num_workers == 1 or work_bytes < _MIN_POOL_BYTES:
            with torch_in_one_thread():
                for group in groups:
                    finish(group, prepare_group(group, audio_dir=audio_dir, data_dir=data_dir))
        else:
            _run_pool(groups, finish, audio_dir=audio_dir, data_dir=data_dir, num_workers=num_workers)
    return results


def _run_pool(
    groups: list[Group],
    finish: Callable[[Group, GroupResult], None],
    *,
    audio_dir: Path,
    data_dir: Path,
    num_workers: int,
) -> None:
    # Spawned, not forked: a forked child of a process that has run torch threads may hang.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    largest_first = sorted(groups, key=lambda group: -group.size)  # so that no long file is left for the end
    futures: dict[Future[GroupResult], Group] = {}
    try:
        with _held_signals():
            try:
                for group in largest_first:
                    futures[pool.submit(prepare_group, group, audio_dir=audio_dir, data_dir=data_dir)] = group
            except OSError as error:  # "handle is closed", by the pool: a process died while another was starting
                raise BrokenProcessPool from error
        for future in as_completed(futures):
            finish(futures[future], future.result())
    except BrokenProcessPool as error:
        raise UserError(
            "a process that decodes audio died (killed, or out of RAM); run the same command again to continue, "
            "with data.num_workers=1 if it happens again"
        ) from error
    finally:
        # The pool does not know of a process that it was starting when another one died, and would wait for it for
        # ever. After an error, what is half-written is not used.
        workers = set(multiprocessing.active_children()) - others
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
        pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    """Set up a process of the pool: one thread, only its parent answers Ctrl-C, and it ends when its parent does."""
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        parent.join()
        os._exit(1)  # if the parent is killed, no worker may go on writing

    threading.Thread(target=follow_parent, daemon=True).start()


@contextmanager
def _held_signals() -> Iterator[None]:
    """Delay signals that ask to stop until after the block; processes that are started in it inherit that."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
