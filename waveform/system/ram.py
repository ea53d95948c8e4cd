"""How much RAM there is: a request for more is refused, in one line, before the system kills the process."""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from waveform.system.container import memory_limit_bytes
from waveform.system.errors import UserError


def machine_bytes() -> int:
    """RAM of this machine, swap included, or what a container allows if that is less."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        present = 1024 * (int(fields["MemTotal"]) + int(fields["SwapTotal"]))
    return min(present, memory_limit_bytes() or present)


def require_ram(num_bytes: int, *, what: str, remedy: str) -> None:
    """Raises UserError if `what` would take more RAM than there is; remedy: how to make it smaller."""
    present = machine_bytes()
    if num_bytes > present:
        raise UserError(
            f"{what} would take {num_bytes / 1e9:,.1f} GB, more than the {present / 1e9:,.1f} GB that this machine "
            f"(or its container) has; {remedy}"
        )


@contextmanager
def limited_to_ram() -> Iterator[None]:
    """Within, a request that takes this process beyond the machine's RAM fails.

    Linux would grant it, and kill the process silently once it used what it was given. The limit covers private
    writable memory, not mapped files. It is not set if the machine has a CUDA device, whose own allocator refuses: how
    much of a driver's address space would count has not been measured.
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
    """Whether an error says that there is not enough RAM or GPU memory."""
    if isinstance(error, MemoryError):
        return True
    refused = type(error).__name__ == "OutOfMemoryError" or re.search("can't allocate|not enough memory", str(error))
    return isinstance(error, RuntimeError) and bool(refused)
