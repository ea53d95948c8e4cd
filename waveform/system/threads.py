"""How torch's operations and compiled kernels share the threads."""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

_lent = 0  # threads that torch leaves to kernels; 0: none, so both use as many as torch has


def kernel_threads() -> int:
    """How many threads kernels may use."""
    return _lent or torch.get_num_threads()


@contextmanager
def torch_in_one_thread() -> Iterator[None]:
    """While open, torch's operations run in one thread, and kernels in as many as torch had.

    A small model's operations are too short to be shared, and torch's threads spin while they wait for the next one,
    which keeps kernels from the cores.
    """
    global _lent
    if _lent:
        yield
        return
    _lent = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_lent)
        _lent = 0


def run_parts(kernel: Callable[[Any, int, Any], None], num_parts: int, phase: Any, plan: Any) -> None:
    """Call kernel(phase, part, plan) for every part: the first in this thread, the others in threads of their own."""
    others = [_pool(os.getpid(), num_parts - 1).submit(kernel, phase, part, plan) for part in range(1, num_parts)]
    kernel(phase, 0, plan)
    for other in others:
        other.result()


@functools.cache
def _pool(process: int, num_threads: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernel")
