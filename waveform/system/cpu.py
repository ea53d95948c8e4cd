"""CPU defaults of the command line; a user's settings in the environment take precedence."""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt(3)


def set_defaults() -> None:
    """Make training and sampling on a CPU fast; call it before torch is imported."""
    _keep_freed_memory()
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
