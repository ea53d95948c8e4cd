"""Memory that this machine does not have: refused, and told in a line, before the system kills who takes it."""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def machine_bytes() -> int:
    """Memory of this machine, swap included."""
    with suppress(OSError):
        fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        return 1024 * (int(fields["MemTotal"]) + int(fields["SwapTotal"]))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def no_more_than_there_is() -> Iterator[None]:
    """Within, a request that takes this process beyond the memory of the machine fails.

    Linux grants it, and kills the process without a word once it uses what it was given. The limit is on memory that
    is private and writable, not on files that are mapped. There is none beside a CUDA device, whose own allocator
    refuses: how much of a driver's address space would count has not been measured.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = machine_bytes() if soft == resource.RLIM_INFINITY else min(soft, machine_bytes())
    if Path("/dev/nvidiactl").exists():
        limit = soft
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory was refused, of the machine or of a GPU."""
    if isinstance(error, MemoryError):
        return True
    refused = type(error).__name__ == "OutOfMemoryError" or re.search("can't allocate|not enough memory", str(error))
    return isinstance(error, RuntimeError) and bool(refused)
