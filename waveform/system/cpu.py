"""CPU defaults of the command line, which a user's environment overrides; how many cores there are, and who waits."""

import ctypes
import math
import os
import sys
import threading
from pathlib import Path

from waveform.system.console import counted
from waveform.system.container import cpu_limit

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt(3)


def set_defaults() -> None:
    """Make training and sampling on a CPU fast; call it before numpy, torch or numba is imported."""
    _keep_freed_memory()
    if num_cores() < _num_visible_cores():
        # OpenMP (torch, numpy) and numba do not look at a container's CPU time. If there were more threads, they would
        # use it up early in each period and then all wait for the next one.
        for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ.setdefault(variable, str(num_cores()))
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads wait for each other thousands of times a second. By default they spin for milliseconds, so a single
        # busy process slows two threads twenty-fold; with this many turns an idle machine is measurably no slower.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _keep_freed_memory() -> None:
    """Make glibc keep freed tensors instead of returning them to the system.

    By default freeing a large tensor unmaps it, and the next allocation faults in each page again, which doubles the
    cost of attention scores. Does nothing on other systems, or if MALLOC_* or GLIBC_TUNABLES is set.
    """
    set_by_user = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if set_by_user or not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)


def num_cores() -> int:
    """How many cores this process may keep busy: those of its affinity, fewer if its container has less CPU time.

    A part of a core counts as a core, as it does for Java and Go.
    """
    limit = cpu_limit()
    return _num_visible_cores() if limit is None else min(_num_visible_cores(), math.ceil(limit))


def why_threads(num_threads: int) -> str:
    """Where torch's number of threads comes from, for a user who expected a different one."""
    visible, limit = _num_visible_cores(), cpu_limit()
    if limit is not None and num_threads == num_cores() < visible:
        return f"the container has the CPU time of {limit:g} of {counted(visible, 'core')}"
    if os.environ.get("OMP_NUM_THREADS") == str(num_threads):
        return f"OMP_NUM_THREADS={num_threads}"
    if num_threads == visible:
        return f"this process may use {counted(visible, 'core')}"
    return f"torch's own choice for {counted(visible, 'core')}"


def _num_visible_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def waited_s() -> float:
    """Seconds in which this thread could have run since it began, but others did; 0 if the system does not say.

    From Linux's schedstat: nanoseconds on a core, nanoseconds of waiting for one, number of turns.
    """
    try:
        fields = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
        return int(fields[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
