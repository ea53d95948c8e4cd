"""How torch's operations and compiled kernels share the threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lent = 0  # threads that torch leaves to kernels; 0: it leaves none, and both use its number


def kernel_threads() -> int:
    """Threads for kernels."""
    return _lent or torch.get_num_threads()


@contextmanager
def torch_in_one_thread() -> Iterator[None]:
    """While open, torch's operations run in one thread, and kernels in as many as torch had.

    Those of a small model are too short to be shared, and a thread that waits for torch's next one spins: it keeps a
    kernel from its core.
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
