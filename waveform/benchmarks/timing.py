"""Times repeated work: the duration of a call, whether there are enough repeats, and their spread.

torch.utils.benchmark calls what it times twice more to warm up, and all repeats of one thing before the next; here a
call changes state, and what is compared takes turns.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MAX_REPEATS = 7
_MIN_REPEATS = 3
_REPEATS_S = 5.0  # of timing, once there are _MIN_REPEATS


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, min, max and number of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def seconds(function: Callable[[], Any], *, device: torch.device) -> float:
    """Return the wall-clock time of a call, including what it leaves queued on a GPU."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    began = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - began


def enough(durations_s: Sequence[float]) -> bool:
    """Whether these repeats suffice."""
    return len(durations_s) >= MAX_REPEATS or (len(durations_s) >= _MIN_REPEATS and sum(durations_s) >= _REPEATS_S)
