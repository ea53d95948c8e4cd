"""How long this thread has waited for a core that others used: whether training had the machine to itself."""

import threading
from pathlib import Path


def waited_s() -> float:
    """Seconds in which this thread could have run since it began, but others did; 0 if the system does not say.

    From Linux's schedstat: nanoseconds on a core, nanoseconds of waiting for one, number of turns.
    """
    try:
        fields = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
        return int(fields[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
