"""CPU defaults of the command line; a user's own settings in the environment always win."""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt(3)


def set_defaults() -> None:
    """Set what makes training and sampling on a CPU fast; to be called before torch is imported."""
    _keep_freed_memory()
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads wait for one another thousands of times a second. By default they spin for milliseconds, so one
        # other busy process slows two threads twenty-fold; this many turns cost an idle machine nothing measurable.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _keep_freed_memory() -> None:
    """Make glibc keep freed tensors instead of returning them to the system.

    By default every free of a large tensor unmaps it, and the next allocation faults each page in anew; attention
    scores cost twice the time so. Does nothing elsewhere, or where MALLOC_* or GLIBC_TUNABLES is set.
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
